// Charts of one deployment over the last minutes, polled.

const PAUSE_MS = 2000;
const SHOWN_S_MIN = 60;
const place = document.getElementById("charts");
const charts = [...place.querySelectorAll("[data-chart]")].map((figure) => ({ figure, key: figure.dataset.chart, unit: figure.dataset.unit, labels: null, plot: null }));

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (seconds, isShort) => new Date(seconds * 1000).toLocaleTimeString("en-GB",
  { hour: "2-digit", minute: "2-digit", ...(isShort ? { second: "2-digit" } : {}) });

function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 10000) return `${Number((value / 1000).toPrecision(3))} k`;
  return String(Number(value.toPrecision(3)));
}

function draw(chart, labels, data) {
  const box = chart.figure.querySelector(".plot");
  chart.plot?.destroy();
  box.replaceChildren();
  const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  chart.labels = labels;
  chart.plot = new uPlot({
    width: box.clientWidth,
    height: box.clientHeight,
    padding: [8, 26, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "deployment" }, points: { size: 6 }, y: false },
    scales: { x: { time: true }, y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [{ ...axis, space: 70, size: 26, values: (_, ticks) => ticks.map((tick) => clock(tick, ticks[1] - ticks[0] < 60)) }, { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map(short) }],
    series: [{}, ...labels.map((label, at) => ({ label, stroke: color(`--series-${(at % 4) + 1}`), width: 1.6, points: { show: false }, spanGaps: false }))],
    hooks: { setCursor: [() => legend(chart)] },
  }, data, box);
}

function legend(chart) {
  const { plot, figure, labels, unit } = chart;
  const at = plot.cursor.idx ?? plot.data[0].length - 1;
  const texts = labels.map((label, place) => `${label} ${short(plot.data[place + 1][at])}`);
  figure.querySelector(".legend").replaceChildren(...labels.map((label, place) => {
    const entry = document.createElement("span");
    const key = document.createElement("i");
    key.className = `key s${(place % 4) + 1}`;
    const value = document.createElement("b");
    value.textContent = short(plot.data[place + 1][at]);
    entry.append(key, `${label} `, value);
    return entry;
  }));
  if (plot.cursor.idx === null) figure.querySelector(".plot").setAttribute("aria-label", `${figure.querySelector("figcaption").firstChild.textContent}${unit && `, ${unit}`}, now: ${texts.join(", ") || "nothing"}`);
}

let latest = null;

function show(answer) {
  latest = answer;
  const now = answer.now;
  for (const chart of charts) {
    const series = answer.charts[chart.key] ?? [];
    const labels = series.map(({ label }) => label);
    const data = [answer.times, ...series.map(({ values }) => values)];
    if (!chart.plot || chart.labels.join("\n") !== labels.join("\n")) draw(chart, labels, data);
    else chart.plot.setData(data);
    chart.plot.setScale("x", { min: Math.min(answer.times[0] ?? now, now - SHOWN_S_MIN), max: now });
    legend(chart);
  }
}

async function refresh() {
  if (!document.hidden) {
    try {
      const response = await fetch(place.dataset.figures);
      if (response.ok) show(await response.json());
    } catch { /* the next time, perhaps */ }
  }
  setTimeout(refresh, PAUSE_MS);
}

new ResizeObserver(() => {
  for (const { plot, figure } of charts) {
    const { clientWidth: width, clientHeight: height } = figure.querySelector(".plot");
    if (plot && plot.width !== width) plot.setSize({ width, height });
  }
}).observe(place);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.labels = [""];
  if (latest) show(latest);
});
refresh();
