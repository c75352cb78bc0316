// Charts of one deployment over one range of time, polled.

const PAUSE_MS = 2000;
const LONG_PAUSE_MS = 30000;
const LONG_S = 7200;
const DAY_S = 86400;
const SHOWN_S_MIN = 60;
const STEPS_S = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 360, 720].map((minutes) => minutes * 60), ...[1, 2, 5, 10].map((days) => days * DAY_S)];
const place = document.getElementById("charts");
const charts = [...place.querySelectorAll("[data-chart]")].map((figure) => ({ figure, key: figure.dataset.chart, unit: figure.dataset.unit, labels: null, plot: null }));

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (seconds, step) => new Date(seconds * 1000).toLocaleString("en-GB", step >= DAY_S ? { day: "numeric", month: "short" }
  : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) });

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
    axes: [{ ...axis, space: 60, size: 26, incrs: STEPS_S, filter: (plot, ticks) => ticks.map((tick) => tick > plot.scales.x.max ? null : tick), values: (_, ticks, axisAt, space, step) => ticks.map((tick) => tick === null ? null : clock(tick, step)) }, { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map(short) }],
    series: [{}, ...labels.map((label, at) => ({ label, stroke: color(`--series-${(at % 4) + 1}`), width: 1.6, points: { show: false }, spanGaps: false }))],
    hooks: { setCursor: [() => legend(chart)], drawAxes: [mark] },
  }, data, box);
}

// Revisions, on the time axis that all charts share.
function mark({ ctx, bbox, valToPos }) {
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("--soft");
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  let end = -Infinity;
  for (const [time, number] of (latest?.marks ?? []).toSorted((one, other) => one[0] - other[0])) {
    const x = Math.round(valToPos(time, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (x > end) {
      const width = ctx.measureText(`r${number}`).width + 3 * devicePixelRatio;
      ctx.textAlign = x + width > bbox.left + bbox.width ? "right" : "left";
      ctx.fillText(`r${number}`, x + (ctx.textAlign === "left" ? 3 : -3) * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
      end = x + 2 * width;
    }
  }
  ctx.restore();
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
  const start = Math.max(answer.since, Math.min(answer.times[0] ?? now, now - SHOWN_S_MIN));
  for (const chart of charts) {
    const series = answer.charts[chart.key] ?? [];
    const labels = series.map(({ label }) => label);
    const data = [answer.times, ...series.map(({ values }) => values)];
    if (!chart.plot || chart.labels.join("\n") !== labels.join("\n")) draw(chart, labels, data);
    else chart.plot.setData(data);
    chart.plot.setScale("x", { min: start, max: now });
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
  setTimeout(refresh, latest && latest.now - latest.since > LONG_S ? LONG_PAUSE_MS : PAUSE_MS);
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
