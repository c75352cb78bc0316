// The plots of a configuration search.

const ROWS_MAX = 40;

// What is chosen is shown in every plot of its group.
function groupState(group, place) {
  return { ...group, id: `g${place}`, model: 0, chosen: -1, latency: group.latency, kind: group.axes[0], redraws: [] };
}

function pick(state, variant) {
  state.chosen = state.chosen === variant ? -1 : variant;
  const home = document.activeElement.closest("section");
  const reachable = () => [...(home?.querySelectorAll("button, svg[tabindex]") || [])];
  const at = reachable().indexOf(document.activeElement);
  state.redraws.forEach((redraw) => redraw());
  // What had the focus was drawn anew; plots are there in the next frame.
  if (at >= 0) requestAnimationFrame(() => requestAnimationFrame(() => reachable()[at]?.focus({ preventScroll: true })));
}

// Colours of the variants that have one; all others are alike until one is chosen.
function shades(state) {
  const found = new Map();
  state.variants.forEach(({ shade }, place) => shade && found.set(place, `var(--${shade})`));
  if (state.chosen >= 0 && !found.has(state.chosen)) found.set(state.chosen, color(1));
  return found;
}

function metricRows(state, load) {
  const of = load.of[state.model];
  const between = ([, low, high], text) => (high > low ? ` (${text(low)} to ${text(high)})` : "");
  const rows = [];
  if (of.throughput) rows.push(["Throughput", null, `${threeDigits(of.throughput[0])}/s${between(of.throughput, threeDigits)}`]);
  for (const name of state.latencies)
    if (of[name]) rows.push([name, null, durationText(of[name][0]) + (name === state.latency ? between(of[name], durationText) : "")]);
  for (const [key, name] of state.memories)
    if (of[key]) rows.push([name, null, UNITS.megabytes(Math.round(of[key][0]))]);
  if (!load.keeps) rows.push(["Limits", null, "missed"]);
  return rows;
}

function stopOf(state, place, load, yName, shade) {
  const variant = state.variants[place];
  const of = load.of[state.model];
  return {
    x: of.throughput[0], y: of[yName][0], color: shade, variant: place,
    title: `${variant.name}, ${load.text}`,
    rows: [["", null, variant.settings], ...metricRows(state, load)],
  };
}

// What was picked, and the way to its section.
function pickedLine(state) {
  const line = element("p", { class: "picked", "aria-live": "polite" });
  if (state.chosen < 0) return line;
  const variant = state.variants[state.chosen];
  line.append(element("a", { href: `#${state.id}-v${state.chosen}` }, variant.name), `: ${variant.settings}`);
  return line;
}

function chips(state) {
  const group = element("fieldset", { class: "choices", "aria-label": "Configurations" });
  for (const [place, shade] of shades(state)) {
    group.append(toggle(state.variants[place].label, state.chosen < 0 || state.chosen === place, () => pick(state, place), shade));
  }
  return group;
}

function modelChoice(state) {
  if (state.models.length < 2) return [];
  return [captioned("Model", choice("Model", state.models, state.model, (place) => {
    state.model = place;
    state.redraws.forEach((redraw) => redraw());
  }))];
}

// ---- latency against throughput

function drawTradeoff(state) {
  const usable = state.variants.some((variant) => variant.loads.some((load) => load.of[state.model][state.latency] && load.of[state.model].throughput));
  if (!usable) return;
  const body = element("div");
  const redraw = () => body.replaceChildren(chips(state), tradeoffPlot(state), pickedLine(state));
  const controls = element("div", { class: "controls" }, ...modelChoice(state));
  if (state.latencies.length > 1)
    controls.append(captioned("Latency", choice("Latency", state.latencies, state.latencies.indexOf(state.latency), (place) => { state.latency = state.latencies[place]; redraw(); })));
  controls.append(axisChoice(state.kind, (kind) => { state.kind = kind; redraw(); }));
  state.redraws.push(redraw);
  section(`${state.id}-latency`, controls, body);
  redraw();
}

function tradeoffPlot(state) {
  const named = shades(state);
  const stops = [];
  const series = [];
  // Those that matter are drawn last, over the others.
  const order = [...state.variants.keys()].sort((a, b) => rank(a) - rank(b));
  function rank(place) {
    return place === state.chosen ? 3 : state.variants[place].role === "recommended" ? 2 : named.has(place) ? 1 : 0;
  }
  for (const place of order) {
    const variant = state.variants[place];
    const loads = variant.loads.filter((load) => load.of[state.model].throughput && load.of[state.model][state.latency]);
    if (!loads.length) continue;
    const faint = state.chosen >= 0 ? place !== state.chosen : !named.has(place);
    const shade = named.get(place) || "var(--s5)";
    const points = [];
    const hollow = [];
    loads.forEach((load, at) => {
      // Batch sizes are lines of their own.
      if (at && load.batch !== loads[at - 1].batch) { points.push([NaN, NaN]); hollow.push(false); }
      points.push([load.of[state.model].throughput[0], load.of[state.model][state.latency][0]]);
      hollow.push(!load.keeps);
    });
    const best = variant.loads[variant.best]?.of[state.model];
    // The interval of the best load, along and across.
    const whiskers = faint || !best || !best.throughput || !best[state.latency] ? [] : [
      [best.throughput[1], best[state.latency][0], best.throughput[2], best[state.latency][0]],
      [best.throughput[0], Math.max(best[state.latency][1], 1), best.throughput[0], best[state.latency][2]],
    ];
    series.push({ name: variant.name, color: shade, points, hollow, whiskers, faint, thin: faint, dashed: variant.default, marked: true });
    if (state.chosen < 0 || !faint) stops.push(...loads.map((load) => stopOf(state, place, load, state.latency, shade)));
  }
  const limits = state.limits[state.model].flatMap((limit) => limit.metric === state.latency ? [{ y: limit.value, text: `${limit.metric} ${limit.text}` }]
    : limit.metric === "perf_throughput" ? [{ x: limit.value, text: limit.text }] : []);
  return plot({
    title: `${state.latency} latency against throughput of every configuration`, series: withoutGaps(series), limits, height: 400,
    stops: stops.sort((a, b) => a.x - b.x), pick: (stop) => pick(state, stop.variant),
    x: { kind: "linear", unit: "count", name: data.throughput },
    y: { kind: state.kind, unit: "duration", name: `${state.latency} latency` },
  });
}

// A gap has no place on an axis: a line with gaps is several.
function withoutGaps(series) {
  return series.flatMap((line) => {
    const pieces = [{ ...line, points: [], hollow: [] }];
    line.points.forEach((point, place) => {
      if (Number.isNaN(point[0])) return pieces.push({ ...line, points: [], hollow: [], whiskers: [] });
      const piece = pieces[pieces.length - 1];
      piece.points.push(point);
      piece.hollow.push(line.hollow[place]);
    });
    return pieces;
  });
}

// ---- throughput by the size of a request

function drawSizes(state) {
  const sizes = new Set(state.variants.flatMap((variant) => variant.loads.map((load) => load.batch)));
  if (sizes.size < 2) return;
  const body = element("div");
  const redraw = () => body.replaceChildren(chips(state), sizesPlot(state), pickedLine(state));
  const controls = element("div", { class: "controls" }, ...modelChoice(state));
  state.redraws.push(redraw);
  section(`${state.id}-sizes`, controls, body);
  redraw();
}

// Of a variant the best load of each size; where none keeps the limits, the best of all.
function bestOfSizes(state, variant) {
  const found = new Map();
  for (const load of variant.loads) {
    const rate = load.of[state.model].throughput?.[0];
    if (rate === undefined) continue;
    const known = found.get(load.batch);
    if (!known || load.keeps > known.keeps || (load.keeps === known.keeps && rate > known.of[state.model].throughput[0])) found.set(load.batch, load);
  }
  return [...found.entries()].sort((a, b) => a[0] - b[0]);
}

function sizesPlot(state) {
  const named = shades(state);
  const stops = [];
  const series = [...state.variants.entries()].flatMap(([place, variant]) => {
    const best = bestOfSizes(state, variant);
    if (!best.length) return [];
    const faint = state.chosen >= 0 ? place !== state.chosen : !named.has(place);
    const shade = named.get(place) || "var(--s5)";
    if (state.chosen < 0 || !faint)
      stops.push(...best.map(([batch, load]) => ({ ...stopOf(state, place, load, "throughput", shade), x: batch, y: load.of[state.model].throughput[0] })));
    return [{
      name: variant.name, color: shade, faint, thin: faint, dashed: variant.default, marked: true,
      points: best.map(([batch, load]) => [batch, load.of[state.model].throughput[0]]), hollow: best.map(([, load]) => !load.keeps),
    }];
  }).sort((a, b) => b.faint - a.faint);
  return plot({
    title: "Throughput of every configuration by the size of a request", series, height: 320,
    stops: stops.sort((a, b) => a.x - b.x), pick: (stop) => pick(state, stop.variant),
    x: { kind: "linear", unit: "count", name: "Items of a request" },
    y: { kind: "linear", unit: "count", name: data.throughput },
  });
}

// ---- memory against throughput

function drawMemory(state) {
  const kinds = state.memories.filter(([key]) => state.variants.some((variant) => variant.loads.some((load) => load.of[state.model][key])));
  const measured = state.variants.filter((variant) => variant.best >= 0);
  if (!kinds.length || measured.length < 2) return;
  let [key, name] = kinds[0];
  const body = element("div");
  const redraw = () => body.replaceChildren(memoryPlot(state, key, name));
  const controls = element("div", { class: "controls" });
  if (kinds.length > 1) controls.append(choice("Memory", kinds.map((kind) => kind[1]), 0, (place) => { [key, name] = kinds[place]; redraw(); }));
  state.redraws.push(redraw);
  section(`${state.id}-memory`, controls, body);
  redraw();
}

function memoryPlot(state, key, name) {
  const named = shades(state);
  const found = [...state.variants.entries()].flatMap(([place, variant]) => {
    const load = variant.loads[variant.best];
    return load && load.of[state.model].throughput && load.of[state.model][key] ? [[place, load]] : [];
  });
  const series = found.map(([place, load]) => {
    const faint = state.chosen >= 0 ? place !== state.chosen : !named.has(place);
    return {
      color: named.get(place) || "var(--s5)", faint, loose: true, marked: true, hollow: [!load.keeps],
      points: [[load.of[state.model].throughput[0], load.of[state.model][key][0]]],
      endName: faint ? "" : state.variants[place].name,
    };
  }).sort((a, b) => b.faint - a.faint);
  const stops = found.map(([place, load]) => stopOf(state, place, load, key, named.get(place) || "var(--s5)")).sort((a, b) => a.x - b.x);
  const limits = state.limits[state.model].filter((limit) => limit.metric === key).map((limit) => ({ y: limit.value, text: limit.text }));
  return plot({
    title: `${name} against throughput`, series, stops, limits, height: 300, pick: (stop) => pick(state, stop.variant),
    x: { kind: "linear", unit: "count", name: data.throughput },
    y: { kind: "linear", unit: "megabytes", name },
  });
}

// ---- how the search went

function drawSearch(state) {
  const phases = state.phases.map(([phase]) => phase);
  const colors = new Map(state.phases);
  const shade = (purpose) => `var(--${colors.get(purpose)})`;
  const body = element("div");
  const redraw = () => body.replaceChildren(
    legend([...phases.map((phase) => [phase, shade(phase)]), ...(state.trials.some((trial) => trial.failed) ? [["failed", "var(--bad)"]] : [])], "square"), searchPlot(state, phases, shade), rowsOfTrials(state, shade));
  state.redraws.push(redraw);
  section(`${state.id}-search`, body);
  redraw();
}

function trialStop(state, trial, shade) {
  const variant = state.variants[trial.variant];
  const rows = [["", null, variant ? variant.settings : ""], ["Load", null, trial.load], ["Why", null, trial.purpose],
    ["Took", null, `${threeDigits((trial.end - trial.begin) / 1000)} s`]];
  if (trial.throughput !== null) rows.push(["Throughput", null, `${threeDigits(trial.throughput)}/s`]);
  if (trial.failed) rows.push(["Failed", null, trial.failed.slice(0, 60)]);
  if (trial.resumed) rows.push(["From", null, "the journal"]);
  return { x: (trial.begin + trial.end) / 2, y: trial.throughput ?? 0, color: shade, variant: trial.variant, rows,
    title: `${trial.number}. ${variant ? variant.name : "a configuration"}` };
}

function searchPlot(state, phases, shade) {
  const series = phases.map((phase) => {
    const trials = state.trials.filter((trial) => trial.purpose === phase && trial.throughput !== null);
    return { name: phase, color: shade(phase), loose: true, marked: true,
      points: trials.map((trial) => [(trial.begin + trial.end) / 2, trial.throughput]) };
  });
  if (state.chosen >= 0) for (const line of series) line.faint = true;
  if (state.chosen >= 0)
    series.push({ color: shades(state).get(state.chosen), loose: true, marked: true,
      points: state.trials.filter((trial) => trial.variant === state.chosen && trial.throughput !== null).map((trial) => [(trial.begin + trial.end) / 2, trial.throughput]) });
  const stops = state.trials.filter((trial) => trial.throughput !== null).map((trial) => trialStop(state, trial, shade(trial.purpose)));
  return plot({
    left: (width) => namesWidth(state, width),
    title: "Throughput of every measurement, by time", series: series.filter((line) => line.points.length), stops, height: 240,
    pick: (stop) => pick(state, stop.variant),
    x: { kind: "linear", unit: "seconds", range: [0, Math.max(...state.trials.map((trial) => trial.end), 1)] },
    y: { kind: "linear", unit: "count", name: data.throughput },
  });
}

// A row for each configuration, best first: when it was measured, and so when it was dropped.
function rowsOfTrials(state, shade) {
  const figure = element("figure");
  let width = 0;
  const redraw = () => {
    if (!figure.clientWidth) return;
    width = figure.clientWidth;
    figure.replaceChildren(rowsDrawn(state, shade, width));
  };
  new ResizeObserver(() => figure.clientWidth !== width && redraw()).observe(figure);
  return figure;
}

// The width of the names beside the rows. The plot above leaves the same, so both have one time axis.
function namesWidth(state, width) {
  const letters = Math.max(...state.variants.map((variant) => variant.name.length), 1);
  return Math.max(52, Math.min(letters * 6.3 + 14, width * (width < 520 ? 0.36 : 0.24)));
}

function rowsDrawn(state, shade, width) {
  const used = [...state.variants.keys()].filter((place) => state.trials.some((trial) => trial.variant === place));
  const shown = used.slice(0, ROWS_MAX);
  if (state.chosen >= 0 && !shown.includes(state.chosen)) shown.push(state.chosen);
  const frame = { left: namesWidth(state, width), right: width - 14 };
  const step = 17;
  const height = shown.length * step + 24;
  const x = scale("linear", 0, Math.max(...state.trials.map((trial) => trial.end), 1), frame.left, frame.right);
  const hidden = used.length - shown.length;
  const svg = shape("svg", { class: "trials", viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `When each of ${shown.length} configurations was measured, best first${hidden ? `; ${hidden} more are not shown` : ""}` });
  const room = Math.max(4, Math.floor((frame.left - 12) / 6.3));
  shown.forEach((place, row) => {
    const top = row * step;
    const chosen = place === state.chosen;
    const { name } = state.variants[place];
    const line = shape("g");
    line.append(
      shape("rect", { class: `band${chosen ? " chosen" : ""}`, x: 0, y: top, width, height: step }),
      // The end of a name tells it from the others.
      shape("text", { x: frame.left - 8, y: top + 12, "text-anchor": "end", ...(chosen ? { class: "chosen" } : {}) }, name.length > room ? `…${name.slice(1 - room)}` : name),
      shape("line", { class: "grid", x1: frame.left, x2: frame.right, y1: top + step / 2, y2: top + step / 2 }));
    for (const trial of state.trials.filter((each) => each.variant === place)) {
      const bar = shape("rect", { x: x(trial.begin), y: top + 3, width: Math.max(2, x(trial.end) - x(trial.begin) - 1), height: step - 6, rx: 2,
        fill: trial.failed ? "var(--bad)" : shade(trial.purpose), opacity: state.chosen < 0 || chosen ? 1 : 0.35 });
      bar.append(shape("title", {}, `${name}, ${trial.load}: ${trial.purpose}${trial.failed ? `, failed: ${trial.failed}` : ""}`));
      line.append(bar);
    }
    line.addEventListener("click", () => pick(state, place));
    svg.append(line);
  });
  if (hidden) svg.append(shape("text", { x: frame.left, y: shown.length * step + 14 }, `and ${hidden} more`));
  return svg;
}

// ---- the sections of configurations

function openLinked() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target || target.tagName !== "DETAILS") return;
  target.open = true;
  target.scrollIntoView();
}

function drawVariantParts(state) {
  state.variants.forEach((variant, place) => {
    const folded = document.getElementById(`${state.id}-v${place}`);
    const parts = folded?.querySelector(".parts");
    const draw = () => folded.open && !parts.hasChildNodes() && fill(parts, state, variant);
    folded?.addEventListener("toggle", draw);
    if (folded) draw();
  });
}

function fill(place, state, variant) {
  const names = [...new Set(variant.loads.flatMap((load) => load.parts.flat().map((part) => part.model)))];
  for (const name of names) {
    const rows = variant.loads.map((load) => [load.text, load.parts.flat().find((part) => part.model === name)]).filter(([, part]) => part);
    const used = usedParts(rows);
    const title = names.length > 1 ? `${data.titles.breakdown}: ${name}` : data.titles.breakdown;
    place.append(element("h3", {}, title), stacks(rows, used), legend(used.map(([key, text]) => [text, `var(--p-${key})`]), "square"));
  }
}

data.groups.map(groupState).forEach((state) => {
  drawTradeoff(state);
  drawSizes(state);
  drawMemory(state);
  if (state.trials.some((trial) => trial.throughput !== null)) drawSearch(state);
  drawVariantParts(state);
});
addEventListener("hashchange", openLinked);
openLinked();
