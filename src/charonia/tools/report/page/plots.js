"use strict";
// Line plots in SVG: axes, lines, a cursor with a tooltip for mouse, finger and keyboard. Names reach the page as text only.

// Width of a letter of a label, in pixels, rather more than less.
const LETTER = 6.6;

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function threeDigits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const digits = size < 0.9995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function durationText(nanoseconds) {
  for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
    if (nanoseconds >= 0.9995 * size) return `${threeDigits(nanoseconds / size)} ${unit}`;
  return `${Math.round(nanoseconds)} ns`;
}

const UNITS = {
  // Ticks have no more digits than they need: 0.5 ms, not 0.500 ms.
  duration: (value) => {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
      if (value >= 0.9995 * size) return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${unit}`;
    return value ? `${Number(value.toPrecision(3))} ns` : "0";
  },
  count: (value) => Number(value.toPrecision(6)).toLocaleString("en"),
  megabytes: (value) => value >= 9999.5 ? `${Number((value / 1000).toPrecision(3)).toLocaleString("en")} GB` : `${Number(value.toPrecision(4)).toLocaleString("en")} MB`,
  seconds: (value) => `${Number((value / 1000).toPrecision(6))} s`,
  // x = -log10(1 - share): 1 is 90 %, 2 is 99 %.
  rarity: (value) => {
    if (value < 1) return `${Number((100 * (1 - 10 ** -value)).toPrecision(3))} %`;
    return `${(100 * (1 - 10 ** -value)).toFixed(Math.max(0, Math.round(value) - 2))} %`;
  },
};

function linearTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high * (1 + 1e-9); place++) ticks.push(place * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  for (const factors of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors) {
        const tick = factor * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    if (ticks.length <= wanted || factors.length === 1) return ticks.length > 1 ? ticks : [low, high];
  }
}

function rarityTicks(low, high, wanted) {
  const ticks = [0, -Math.log10(0.5), 1, 2, 3, 4, 5, 6, 7, 8].filter((tick) => tick <= high + 1e-9);
  return wanted < 6 ? ticks.filter((tick) => tick !== 0) : ticks;
}

const TICKS = { linear: linearTicks, log: logTicks, rarity: rarityTicks };

function scale(kind, low, high, from, to) {
  const map = kind === "log" ? Math.log : (value) => value;
  const begin = map(low);
  const length = map(high) - begin || 1;
  return (value) => from + ((map(value) - begin) / length) * (to - from);
}

function extent(kind, values) {
  const usable = kind === "log" ? values.filter((value) => value > 0) : values;
  if (!usable.length) return kind === "log" ? [1, 10] : [0, 1];
  const high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (kind !== "log") return [0, high > 0 ? high * 1.05 : 1];
  const low = usable.reduce((a, b) => Math.min(a, b), Infinity);
  return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
}

// Draws `spec` into a figure, anew for every width, and returns the figure.
//   title      what a screen reader says
//   x, y       {kind: linear|log|rarity, unit: of UNITS, name, range: [low, high] or none, ticks of x or none}
//   series     [{name, color, points: [[x, y]], dashed, thin, marked, faint, endName, tags: text of each point,
//                loose: points without a line, hollow: whether each point is, whiskers: [[x1, y1, x2, y2]]}]
//   stops      [{x, title, rows: [[name, color, text, y or none]]}], where the cursor can be, by x;
//              with y and color too: points anywhere, of which the nearest one is taken
//   pick       called with the stop that was clicked, or chosen by Enter
//   limits     [{x or y, text}], lines across the plot
//   shades     [[from, to]] along x;  marks: [[x, text]] along x
//   left       room left of the plot by its width, or none for the usual
//   height, peers: an array that plots with the same cursor share
function plot(spec) {
  const figure = element("figure");
  const state = { figure, spec, at: -1 };
  const spoken = element("div", { class: "spoken", "aria-live": "polite" });
  const save = element("button", { type: "button", class: "save", "aria-label": `Save as SVG: ${spec.title}` }, "Save");
  save.addEventListener("click", () => download(state));
  let width = 0;
  const redraw = () => {
    if (!figure.clientWidth) return;
    width = figure.clientWidth;
    figure.replaceChildren(drawn(state, width), save, spoken);
    state.spoken = spoken;
  };
  new ResizeObserver(() => figure.clientWidth !== width && redraw()).observe(figure);
  figure.addEventListener("keydown", (event) => onKey(state, event));
  if (spec.peers) spec.peers.push(state);
  return figure;
}

function drawn(state, width) {
  const { spec } = state;
  const height = spec.height || HEIGHT;
  const narrow = width < 520;
  const values = spec.series.flatMap((line) => line.points.map((point) => point[1]));
  const [yLow, yHigh] = spec.y.range || extent(spec.y.kind, values.filter(Number.isFinite));
  const reach = spec.series.flatMap((line) => [...line.points.map((point) => point[0]), ...(line.whiskers || []).map((whisker) => whisker[2])]);
  const [xLow, xHigh] = spec.x.range || extent(spec.x.kind, reach);
  const frame = { left: spec.left ? spec.left(width) : narrow ? 52 : 62, right: width - (spec.room || 14), top: 26, bottom: height - (spec.x.name ? 44 : 26) };
  const x = scale(spec.x.kind, xLow, xHigh, frame.left, frame.right);
  const y = scale(spec.y.kind, yLow, yHigh, frame.bottom, frame.top);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": `${spec.title}. Arrow keys read values.` });
  axes(svg, spec, frame, x, y, { xLow, xHigh, yLow, yHigh, narrow });
  for (const line of spec.series) svg.append(...lineShapes(line, x, y, spec.y.kind, frame));
  for (const limit of spec.limits || []) svg.append(...limitShapes(limit, x, y, frame));
  if (spec.room) svg.append(...endNames(spec.series, x, y, frame));
  const cursor = shape("g");
  svg.append(cursor);
  state.place = { x, y, frame, width, cursor };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    show(state, nearest(state, event.clientX - box.left, event.clientY - box.top), event.clientY - box.top);
  };
  svg.addEventListener("pointermove", (event) => event.pointerType === "mouse" && follow(event));
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && document.activeElement !== svg && hide(state));
  if (spec.pick) {
    svg.style.cursor = "pointer";
    svg.addEventListener("click", () => state.at >= 0 && spec.pick(spec.stops[state.at]));
  }
  svg.addEventListener("focus", () => svg.matches(":focus-visible") && state.at < 0 && show(state, 0));
  svg.addEventListener("blur", () => hide(state));
  state.at = -1;
  return svg;
}

function axes(svg, spec, frame, x, y, bounds) {
  for (const [from, to] of spec.shades || []) {
    const left = Math.max(x(from), frame.left);
    svg.append(shape("rect", { class: "shade", x: left, y: frame.top, width: Math.max(0, Math.min(x(to), frame.right) - left), height: frame.bottom - frame.top }));
  }
  // A label that would touch the one before it is left out; its line stays.
  let above = Infinity;
  for (const tick of TICKS[spec.y.kind](bounds.yLow, bounds.yHigh, (frame.bottom - frame.top) / 38)) {
    svg.append(shape("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick) }));
    if (y(tick) > above - 14) continue;
    above = y(tick);
    svg.append(shape("text", { x: frame.left - 8, y: y(tick) + 4, "text-anchor": "end" }, UNITS[spec.y.unit](tick)));
  }
  let end = -Infinity;
  for (const tick of spec.x.ticks || TICKS[spec.x.kind](bounds.xLow, bounds.xHigh, (frame.right - frame.left) / (bounds.narrow ? 70 : 90))) {
    svg.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: frame.top, y2: frame.bottom }));
    const text = UNITS[spec.x.unit](tick);
    if (x(tick) - LETTER * text.length / 2 < end + LETTER) continue;
    end = x(tick) + LETTER * text.length / 2;
    svg.append(shape("text", { x: x(tick), y: frame.bottom + 18, "text-anchor": "middle" }, text));
  }
  let free = -Infinity;
  for (const [at, text] of spec.marks || []) {
    svg.append(shape("line", { class: "axis", x1: x(at), x2: x(at), y1: frame.top - 6, y2: frame.bottom }));
    if (!text || x(at) < free) continue;
    svg.append(shape("text", { x: x(at) + 4, y: frame.top - 8 - (spec.y.name ? 16 : 0) }, text));
    free = x(at) + 16 + LETTER * text.length;
  }
  svg.append(shape("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
  if (spec.y.name) svg.append(shape("text", { class: "name", x: 0, y: 12 }, spec.y.name));
  if (spec.x.name) svg.append(shape("text", { class: "name", x: frame.right, y: frame.bottom + 38, "text-anchor": "end" }, spec.x.name));
}

// Saves the plot as a file, with the page's style and, below it, the names of its lines.
function download(state) {
  const { spec, figure, place } = state;
  hide(state);
  const svg = figure.querySelector("svg").cloneNode(true);
  let height = Number(svg.getAttribute("height")) + 8;
  for (const line of spec.series.filter((each) => each.name && each.points.length)) {
    height += 18;
    svg.append(shape("line", { x1: 0, x2: 16, y1: height - 12, y2: height - 12, stroke: line.color, "stroke-width": 3, ...(line.dashed ? { "stroke-dasharray": "5 3" } : {}) }));
    svg.append(shape("text", { x: 24, y: height - 8 }, line.name));
  }
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${place.width} ${height}`, width: place.width, height })) svg.setAttribute(key, value);
  const style = document.querySelector("style").textContent;
  svg.prepend(shape("style", {}, `${style} svg { background: var(--card); font-family: system-ui, sans-serif; }`));
  const content = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
  const link = element("a", { href: URL.createObjectURL(content), download: `${spec.title}.svg` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function lineShapes(line, x, y, kind, frame) {
  const shapes = [];
  const visible = (value) => Number.isFinite(value) && (kind !== "log" || value > 0);
  let path = "";
  let pen = "M";
  for (const [at, value] of line.loose ? [] : line.points) {
    if (visible(value)) path += `${pen}${x(at).toFixed(1)} ${Math.min(y(value), frame.bottom + 200).toFixed(1)}`;
    pen = visible(value) ? "L" : "M";
  }
  const style = { fill: "none", stroke: line.color, "stroke-width": line.thin ? 1.25 : 2, "stroke-linejoin": "round", "stroke-linecap": "round" };
  if (line.faint) style["stroke-opacity"] = 0.3;
  if (line.dashed) style["stroke-dasharray"] = "5 5";
  if (path) shapes.push(shape("path", { d: path, ...style }));
  for (const [x1, y1, x2, y2] of line.whiskers || [])
    if (visible(y1)) shapes.push(shape("line", { x1: x(x1), y1: y(y1), x2: x(x2), y2: y(y2), stroke: line.color, "stroke-width": 5, "stroke-opacity": 0.28, "stroke-linecap": "round" }));
  if (line.marked || line.points.length === 1)
    line.points.forEach(([at, value], place) => {
      const hollow = line.hollow && line.hollow[place];
      const look = hollow ? { fill: "var(--card)", stroke: line.color, "stroke-width": 1.5 } : { fill: line.color, stroke: "var(--card)", "stroke-width": 1 };
      if (visible(value)) shapes.push(shape("circle", { cx: x(at), cy: y(value), r: line.faint ? 3 : line.loose ? 4.5 : 3.5, ...look, ...(line.faint ? { opacity: 0.5 } : {}) }));
    });
  if (line.tags) shapes.push(...tagShapes(line, x, y, frame));
  return shapes;
}

// What the points are, below them, where there is room.
function tagShapes(line, x, y, frame) {
  const taken = [];
  return line.points.flatMap(([at, value], place) => {
    // Right of the axis, whose labels it would touch.
    const [left, top] = [Math.max(x(at), frame.left + (LETTER * line.tags[place].length) / 2), y(value) + 17];
    if (!Number.isFinite(top) || taken.some(([other, height]) => Math.abs(other - left) < 30 && Math.abs(height - top) < 14)) return [];
    taken.push([left, top]);
    return [shape("text", { class: "tag", x: left, y: top, "text-anchor": "middle" }, line.tags[place])];
  });
}

// Names behind the rightmost point of each line, moved apart where they would overlap.
function endNames(series, x, y, frame) {
  const names = series
    .filter((line) => line.points.length && line.endName)
    .map((line) => {
      const [at, value] = line.points.reduce((right, point) => (point[0] >= right[0] ? point : right));
      return { text: line.endName, color: line.color, x: x(at) + 9, y: y(value) + 4 };
    })
    .filter((name) => Number.isFinite(name.y))
    .sort((a, b) => a.y - b.y);
  for (let place = 1; place < names.length; place++) names[place].y = Math.max(names[place].y, names[place - 1].y + 14);
  const over = names.length ? names[names.length - 1].y - frame.bottom : 0;
  return names.map((name) => {
    const made = shape("text", { class: "name", x: name.x, y: over > 0 ? name.y - over : name.y }, name.text);
    made.style.fill = name.color;
    return made;
  });
}

// A line across the plot that is not to be crossed, where it is within the axes.
function limitShapes(limit, x, y, frame) {
  const across = "y" in limit;
  const at = across ? y(limit.y) : x(limit.x);
  if (!(across ? at >= frame.top - 1 && at <= frame.bottom : at >= frame.left && at <= frame.right + 1)) return [];
  const ends = across ? { x1: frame.left, x2: frame.right, y1: at, y2: at } : { x1: at, x2: at, y1: frame.top, y2: frame.bottom };
  const where = across ? { x: frame.left + 6, y: at - 6 } : { x: at - 6, y: frame.top + 12, "text-anchor": "end" };
  return [shape("line", { class: "limit", ...ends }), shape("text", { class: "limit", ...where }, limit.text)];
}

function nearest(state, left, top) {
  let best = -1;
  let distance = Infinity;
  const { x, y } = state.place;
  state.spec.stops.forEach((stop, place) => {
    const away = "y" in stop ? Math.hypot(x(stop.x) - left, y(stop.y) - top) : Math.abs(x(stop.x) - left);
    if (away < distance) [best, distance] = [place, away];
  });
  return best;
}

function show(state, at, top = null) {
  if (at < 0) return;
  for (const peer of state.spec.peers || [state]) if (peer.place) mark(peer, at);
  const { spec, figure, place } = state;
  const stop = spec.stops[at];
  const tip = element("div", { class: "tip" }, element("b", {}, stop.title));
  for (const [name, color, text] of stop.rows) {
    const key = element("span", { class: "key" });
    key.style.borderColor = color || "transparent";
    tip.append(element("div", {}, key, element("span", {}, name), element("span", {}, text)));
  }
  figure.querySelector(".tip")?.remove();
  figure.append(tip);
  const left = place.x(stop.x) + 14;
  const flipped = left + tip.offsetWidth > place.width;
  const rightmost = Math.max(0, place.width - tip.offsetWidth);
  tip.style.left = `${Math.min(rightmost, Math.max(0, flipped ? place.x(stop.x) - 14 - tip.offsetWidth : left))}px`;
  const wanted = top === null ? place.frame.top : top - tip.offsetHeight / 2;
  tip.style.top = `${Math.max(0, Math.min(wanted, place.frame.bottom - tip.offsetHeight))}px`;
  if (top === null) state.spoken.textContent = [stop.title, ...stop.rows.map(([name, , text]) => `${name} ${text}`)].join(", ");
}

function mark(state, at) {
  const { x, y, frame, cursor } = state.place;
  const stop = state.spec.stops[at];
  state.at = at;
  if ("y" in stop) {
    cursor.replaceChildren(shape("circle", { cx: x(stop.x), cy: y(stop.y), r: 6.5, fill: stop.color, stroke: "var(--ink)", "stroke-width": 2 }));
    return;
  }
  const shapes = [shape("line", { class: "cursor", x1: x(stop.x), x2: x(stop.x), y1: frame.top, y2: frame.bottom })];
  for (const [, color, , value] of stop.rows) {
    const height = y(value);
    if (color && Number.isFinite(height) && height >= frame.top - 1 && height <= frame.bottom + 1)
      shapes.push(shape("circle", { cx: x(stop.x), cy: height, r: 4.5, fill: color, stroke: "var(--card)", "stroke-width": 1.5 }));
  }
  cursor.replaceChildren(...shapes);
}

function hide(state) {
  for (const peer of state.spec.peers || [state]) {
    peer.place?.cursor.replaceChildren();
    peer.figure.querySelector(".tip")?.remove();
    peer.at = -1;
  }
}

function onKey(state, event) {
  const last = state.spec.stops.length - 1;
  const page = Math.max(1, Math.round(last / 20));
  const moves = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, PageUp: state.at - page, PageDown: state.at + page, Home: 0, End: last };
  if (event.key === "Escape") hide(state);
  if (event.key === "Enter" && state.spec.pick && state.at >= 0) state.spec.pick(state.spec.stops[state.at]);
  if (!(event.key in moves)) return;
  event.preventDefault();
  show(state, Math.min(last, Math.max(0, moves[event.key])));
}
