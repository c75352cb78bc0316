// The plots of a load test.

const dark = matchMedia("(prefers-color-scheme: dark)");
const CURVES_MAX = 6;
let chosenRun = 0;

// Levels have an order, so their colours have one too: from pale to strong, readable on either background.
function levelColor(place, count) {
  const share = count > 1 ? place / (count - 1) : 1;
  const hue = 170 + 155 * share;
  return dark.matches ? `hsl(${hue} ${50 + 20 * share}% ${60 + 10 * share}%)` : `hsl(${hue} ${70 - 5 * share}% ${38 - 4 * share}%)`;
}

// What the values of levels are: all levels of a run are of one kind.
function loadName(levels) {
  const { label, value } = levels[0];
  return `${label[0].toUpperCase()}${label.slice(1, label.length - value.length).trimEnd()}`;
}

// ---- throughput and latency by load

function drawLoad() {
  let percentile = data.percentiles.indexOf(99);
  let kind = data.axis;
  const several = data.runs.length > 1;
  const body = element("div");
  const redraw = () => body.replaceChildren(...loadPlots(several ? [percentile] : [0, 2, 3], kind));
  const controls = element("div", { class: "controls" });
  if (several) controls.append(choice("Percentile", data.percentiles.map(percentName), percentile, (place) => { percentile = place; redraw(); }));
  controls.append(axisChoice(kind, (chosen) => { kind = chosen; redraw(); }));
  section("load", controls, body);
  redraw();
}

function loadPlots(percentiles, kind) {
  const several = data.runs.length > 1;
  const runs = data.runs.map((run) => [...answered(run)].sort((a, b) => a.load - b.load));
  const all = runs.flat();
  const loads = all.map((level) => level.load);
  const [least, most] = [Math.min(...loads), Math.max(...loads)];
  const x = { kind: most > 8 * least ? "log" : "linear", unit: "count", name: loadName(all), ticks: [...new Set(loads)].sort((a, b) => a - b) };
  if (x.kind === "log") x.range = [least / 1.1, most * 1.1];
  const name = (place, percent) => (several ? data.runs[place].name : percentName(data.percentiles[percent]));
  const shade = (place, percent) => color(several ? place : percent);
  const rates = runs.map((levels, place) => ({
    name: several ? data.runs[place].name : data.work, color: color(place), marked: true,
    points: levels.map((level) => [level.load, level.throughput[0]]),
    whiskers: levels.map((level) => [level.load, level.throughput[1], level.load, level.throughput[2]]),
  }));
  const latencies = runs.flatMap((levels, place) => percentiles.map((percent) => ({
    name: name(place, percent), color: shade(place, percent), marked: true, endName: several ? "" : name(place, percent),
    points: levels.map((level) => [level.load, level.latencies[percent]]),
  })));
  const stopsOf = (isRate) => runs.flatMap((levels, place) => levels.map((level) => ({
    x: level.load,
    title: several ? `${data.runs[place].name}: ${level.label}` : level.label,
    rows: [
      ["Throughput", isRate ? color(place) : null, throughputText(level), level.throughput[0]],
      ...percentiles.map((percent) => [percentName(data.percentiles[percent]), isRate ? null : shade(place, percent), durationText(level.latencies[percent]), level.latencies[percent]]).reverse(),
    ],
  }))).sort((a, b) => a.x - b.x);
  const common = { peers: [], room: 50 };
  const plots = [
    plot({ ...common, title: `${data.work} by load`, series: rates, stops: stopsOf(true), height: 220, x: { ...x, name: "" }, y: { kind: "linear", unit: "count", name: data.work } }),
    plot({ ...common, title: "Latency percentiles by load", series: latencies, stops: stopsOf(false), height: 260, x, y: { kind, unit: "duration", name: "Latency" } }),
  ];
  if (several) plots.push(legend(rates.map((line) => [line.name, line.color])));
  return plots;
}

// ---- latency against throughput

function drawTradeoff() {
  const several = data.runs.length > 1;
  let percentile = data.percentiles.indexOf(99);
  let kind = data.axis;
  const body = element("div");
  const redraw = () => body.replaceChildren(several ? tradeoffOfRuns(percentile, kind) : tradeoffOfRun(data.runs[0], kind));
  const controls = element("div", { class: "controls" });
  if (several) controls.append(choice("Percentile", data.percentiles.map(percentName), percentile, (place) => { percentile = place; redraw(); }));
  controls.append(axisChoice(kind, (chosen) => { kind = chosen; redraw(); }));
  section("tradeoff", controls, body);
  redraw();
}

function answered(run) {
  return run.levels.filter((level) => level.requests);
}

function throughputText(level) {
  const [value, low, high] = level.throughput;
  return high > low ? `${threeDigits(value)}/s (${threeDigits(low)} to ${threeDigits(high)})` : `${threeDigits(value)}/s`;
}

function tradeoffOfRun(run, kind) {
  const levels = [...answered(run)].sort((a, b) => a.load - b.load);
  const rates = levels.map((level) => level.throughput[0]);
  const peak = rates.indexOf(Math.max(...rates));
  // Beyond the peak a line would run back over itself: those levels are dashed and hollow.
  const series = data.percentiles.flatMap((percent, place) => {
    const points = levels.map((level) => [level.throughput[0], level.latencies[place]]);
    const tags = place ? null : levels.map((level) => level.value);
    const line = { name: percentName(percent), color: color(place), marked: true };
    const beyond = points.slice(peak);
    return [
      { ...line, endName: percentName(percent), points: points.slice(0, peak + 1), tags: tags && tags.slice(0, peak + 1) },
      ...(beyond.length > 1 ? [{ ...line, points: beyond, dashed: true, thin: true, hollow: beyond.map((_, at) => at > 0), tags: tags && tags.slice(peak) }] : []),
    ];
  });
  const stops = levels.map((level) => ({
    x: level.throughput[0],
    title: level.best && levels.length > 1 ? `${level.label} (best)` : level.label,
    rows: [
      ["Throughput", null, throughputText(level)],
      ...data.percentiles.map((percent, place) => [percentName(percent), color(place), durationText(level.latencies[place]), level.latencies[place]]).reverse(),
    ],
  })).sort((a, b) => a.x - b.x);
  return tradeoffPlot(series, stops, kind, 50);
}

function tradeoffOfRuns(percentile, kind) {
  const series = data.runs.map((run, place) => ({
    name: run.name, color: color(place), marked: true,
    points: answered(run).map((level) => [level.throughput[0], level.latencies[percentile]]),
  }));
  const stops = data.runs.flatMap((run, place) => answered(run).map((level) => ({
    x: level.throughput[0],
    title: `${run.name}: ${level.label}`,
    rows: [
      ["Throughput", null, throughputText(level)],
      [percentName(data.percentiles[percentile]), color(place), durationText(level.latencies[percentile]), level.latencies[percentile]],
    ],
  }))).sort((a, b) => a.x - b.x);
  const made = element("div", {}, tradeoffPlot(series, stops, kind, 0));
  made.append(legend(series.map((line) => [line.name, line.color])));
  return made;
}

function tradeoffPlot(series, stops, kind, room) {
  return plot({
    title: "Latency percentiles against throughput", series, stops, room, height: 340,
    x: { kind: "linear", unit: "count", name: data.work },
    y: { kind, unit: "duration", name: "Latency" },
  });
}

// ---- distribution

function drawDistribution(run, identity = "distribution", key = "curve") {
  const levels = answered(run).filter((level) => level[key]).map((level) => ({ ...level, curve: level[key] }));
  if (!levels.length) return;
  const shown = new Set(levels.keys());
  // More curves than can be told apart: the ends, the best, and what lies evenly between them.
  if (levels.length > CURVES_MAX) {
    shown.clear();
    for (let place = 0; place < CURVES_MAX; place++) shown.add(Math.round((place * (levels.length - 1)) / (CURVES_MAX - 1)));
    shown.add(levels.findIndex((level) => level.best));
    shown.delete(-1);
  }
  let kind = "log";
  const body = element("div");
  const redraw = () => body.replaceChildren(distributionPlot(levels, shown, kind));
  const chips = element("fieldset", { class: "choices", "aria-label": "Levels" });
  levels.forEach((level, place) => chips.append(toggle(level.value, shown.has(place), (button) => {
    if (!shown.delete(place)) shown.add(place);
    button.setAttribute("aria-pressed", shown.has(place));
    redraw();
  }, levelColor(place, levels.length))));
  const axis = axisChoice(kind, (chosen) => { kind = chosen; redraw(); });
  const controls = element("div", { class: "controls" }, axis);
  if (levels.length > 1) controls.append(captioned(loadName(levels), chips));
  section(identity, controls, body);
  if (levels.some((level) => level.curve.service))
    body.after(legend([["Response time, from when a request was to be sent", "var(--soft)"], ["Service time, from when it was sent", "var(--soft)", true]]));
  redraw();
}

function distributionPlot(levels, shown, kind) {
  const chosen = levels.map((level, place) => ({ level, shade: levelColor(place, levels.length) })).filter((_, place) => shown.has(place));
  const line = (level, values, shade, dashed) => ({ color: shade, dashed, points: level.curve.x.map((x, place) => [x, values[place]]) });
  const series = chosen.flatMap(({ level, shade }) => [
    line(level, level.curve.response, shade, false),
    ...(level.curve.service ? [line(level, level.curve.service, shade, true)] : []),
  ]);
  const longest = chosen.reduce((best, { level }) => (level.curve.x.length > best.length ? level.curve.x : best), []);
  const stops = longest.map((x, place) => ({
    x,
    title: place === longest.length - 1 ? "The slowest" : `${rarityText(x)} of requests within`,
    rows: chosen.filter(({ level }) => place < level.curve.x.length).flatMap(({ level, shade }) => [
      [level.label, shade, durationText(level.curve.response[place]), level.curve.response[place]],
      ...(level.curve.service ? [["service time", null, durationText(level.curve.service[place])]] : []),
    ]),
  }));
  const high = longest.length ? longest[longest.length - 1] : 1;
  return plot({
    title: "Latency by percentile", series, stops, height: 340,
    x: { kind: "rarity", unit: "rarity", name: "Percentile", range: [0, Math.max(high, 1)] },
    y: { kind, unit: "duration", name: "Latency" },
  });
}

function rarityText(x) {
  const percent = 100 * (1 - 10 ** -x);
  return `${percent.toFixed(x < 1 ? 0 : Math.ceil(x))} %`;
}

// ---- time line

function drawTimeline(run) {
  const levels = run.levels.filter((level) => level.time.begin.length);
  if (!levels.length) return;
  let chosen = 0;
  let kind = run.axis;
  const body = element("div");
  const redraw = () => body.replaceChildren(...timelinePlots(chosen ? [levels[chosen - 1]] : levels, kind));
  const controls = element("div", { class: "controls" });
  controls.append(axisChoice(kind, (picked) => { kind = picked; redraw(); }));
  if (levels.length > 1)
    controls.append(captioned(loadName(levels), choice("Level", ["Whole run", ...levels.map((level) => level.value)], 0, (place) => { chosen = place; redraw(); })));
  section("timeline", controls, body);
  redraw();
}

function timelinePlots(levels, kind) {
  const gather = (pick) => levels.flatMap((level, place) => [
    // A gap between levels: nothing was measured there.
    ...(place ? [[level.time.begin[0], NaN]] : []),
    ...level.time.begin.map((begin, at) => [(begin + level.time.end[at]) / 2, pick(level.time, at)]),
  ]);
  const origin = levels.length > 1 ? 0 : levels[0].time.begin[0];
  const shift = (points) => points.map(([x, y]) => [x - origin, y]);
  const latency = (key) => gather((time, at) => (time.done[at] ? time[key][at] : NaN));
  const lines = {
    done: { name: "Answered", color: color(0), points: shift(gather((time, at) => time.done[at])) },
    sent: { name: "Sent", color: color(5), dashed: true, thin: true, points: shift(gather((time, at) => time.sent[at])) },
    max: { name: "Slowest", color: color(5), thin: true, points: shift(latency("max")) },
    p99: { name: "p99", color: color(1), points: shift(latency("p99")) },
    p50: { name: "Median", color: color(0), points: shift(latency("p50")) },
    errors: { name: "Errors", color: color(1), points: shift(gather((time, at) => time.errors[at])) },
  };
  const failing = levels.some((level) => level.time.errors.some((rate) => rate > 0));
  const all = levels.flatMap((level) => level.time.begin.map((begin, at) => [level, begin, at]));
  const stopsOf = (shown) => all.map(([level, begin, at]) => ({
    x: (begin + level.time.end[at]) / 2 - origin,
    title: `${threeDigits((begin - origin) / 1000)} s${levels.length > 1 ? `, ${level.label}` : ""}`,
    rows: [
      ["Answered", shown.done, `${threeDigits(level.time.done[at])}/s`, level.time.done[at]],
      ["Sent", shown.sent, `${threeDigits(level.time.sent[at])}/s`, level.time.sent[at]],
      ...(level.time.done[at] ? [
        ["Median", shown.p50, durationText(level.time.p50[at]), level.time.p50[at]],
        ["p99", shown.p99, durationText(level.time.p99[at]), level.time.p99[at]],
        ["Slowest", shown.max, durationText(level.time.max[at]), level.time.max[at]],
      ] : []),
      ...(failing ? [["Errors", shown.errors, `${threeDigits(level.time.errors[at])}/s`, level.time.errors[at]]] : []),
    ],
  }));
  const last = levels[levels.length - 1];
  const common = {
    x: { kind: "linear", unit: "seconds", range: [0, last.time.end[last.time.end.length - 1] - origin] },
    shades: levels.flatMap((level) => level.windows.map(([from, to]) => [from - origin, to - origin])),
    peers: [],
  };
  const panel = (title, unit, yKind, names, height, marks) => plot({
    ...common, title, height, marks, series: names.map((name) => lines[name]),
    stops: stopsOf(Object.fromEntries(names.map((name) => [name, lines[name].color]))),
    y: { kind: yKind, unit, name: title },
  });
  const key = (...names) => legend(names.map((name) => [lines[name].name, lines[name].color, lines[name].dashed]));
  const plain = levels.length > 1 ? levels.map((level) => [level.time.begin[0], ""]) : [];
  const panels = [
    panel("Requests per second", "count", "linear", ["sent", "done"], 190, plain), key("done", "sent"),
    panel("Latency", "duration", kind, ["max", "p99", "p50"], 230, plain), key("p50", "p99", "max"),
  ];
  if (failing) panels.push(panel("Errors per second", "count", "linear", ["errors"], 130, plain));
  return panels;
}

// ---- where the time goes

function drawParts(run) {
  const levels = run.levels.filter((level) => level.parts.length);
  if (!levels.length) return;
  const names = [...new Set(levels.flatMap((level) => level.parts.map((part) => part.model)))];
  const body = element("div");
  const redraw = (name) => {
    const rows = levels.map((level) => [level.label, level.parts.find((part) => part.model === name)]).filter(([, part]) => part);
    const used = usedParts(rows);
    body.replaceChildren(stacks(rows, used), legend(used.map(([key, text]) => [text, `var(--p-${key})`]), "square"));
  };
  const controls = element("div", { class: "controls" });
  if (names.length > 1) controls.append(choice("Model", names, 0, (place) => redraw(names[place])));
  section("parts", controls, body);
  redraw(names[0]);
}

// ---- the page

function drawRun() {
  const run = data.runs[chosenRun];
  for (const name of ["ttft", "itl", "icl"]) drawDistribution(run, name, name);
  drawDistribution(run);
  drawTimeline(run);
  drawParts(run);
}

function draw() {
  // A single point shows nothing that the table does not.
  if (data.runs.reduce((count, run) => count + answered(run).length, 0) > 1) {
    drawLoad();
    drawTradeoff();
  }
  drawRun();
}

if (data.runs.length > 1) {
  const change = (place) => {
    chosenRun = place;
    for (const identity of ["ttft", "itl", "icl", "distribution", "timeline", "parts"]) document.getElementById(identity).hidden = true;
    drawRun();
  };
  const chooser = element("div", { class: "controls" }, element("strong", {}, "Run"), choice("Run", data.runs.map((run) => run.name), 0, change));
  document.getElementById("chooser").append(chooser);
}
dark.addEventListener("change", draw);
draw();
