// What a model answered, as people read it.

const LINE_MAX = 56;  // characters
const LINES_MAX = 16;
const ROW_LINES_MAX = 6;
const TEXTS_MAX = 50;
const RESPONSES_MAX = 100;  // of a stream, that are shown
const TOP = 5;

const SIGNATURES = [["image/png", [0x89, 0x50, 0x4e, 0x47]], ["image/jpeg", [0xff, 0xd8, 0xff]], ["image/gif", [0x47, 0x49, 0x46, 0x38]],
  ["image/webp", [0x52, 0x49, 0x46, 0x46]]];

function pictureType(bytes) {
  return SIGNATURES.find(([, start]) => start.every((byte, place) => bytes[place] === byte))?.[0];
}

function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return null;
  }
}

function outputBlock({ name, datatype, shape, elements }, isClasses) {
  const head = element("div", { class: "fieldhead" }, element("span", { class: "name" }, name),
    isClasses ? "" : element("span", { class: "type" }, `${datatype} ${shapeText(shape)}`));
  return element("div", { class: "output" }, head, ...outputBody(datatype, shape, elements, isClasses));
}

function outputBody(datatype, shape, elements, isClasses) {
  if (!elements.length) return [element("p", { class: "note" }, "No elements")];
  if (isClasses) return [classBars(elements.map((bytes) => textOf(bytes) ?? ""))];
  if (datatype === "BYTES") {
    const shown = Array.from(elements).slice(0, TEXTS_MAX).map(bytesBlock);
    if (elements.length > TEXTS_MAX) shown.push(element("p", { class: "note" }, `and ${elements.length - TEXTS_MAX} more`));
    return shown;
  }
  const picture = pixelsBlock(datatype, shape, elements);
  if (picture) return [picture];
  if (elements.length === 1) return [element("p", { class: "single" }, numberText(elements[0]))];
  return [element("pre", { tabindex: 0 }, numbersText(shape, elements)), ...summary(datatype, shape, elements)];
}

function bytesBlock(bytes) {
  const type = pictureType(bytes);
  if (type) {
    const url = URL.createObjectURL(new Blob([bytes], { type }));
    const image = element("img", { class: "result", alt: "Picture in the answer", src: url });
    image.addEventListener("load", () => URL.revokeObjectURL(url));
    return image;
  }
  const text = textOf(bytes);
  if (text === null) return element("p", { class: "note" }, `${sizeText(bytes.length)} that are not text`);
  return element("pre", { class: "text", tabindex: 0 }, prettyText(text));
}

function prettyText(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// `value:index[:label]` each.
function classBars(texts) {
  const classes = texts.map((text) => {
    const [value, index, ...label] = text.split(":");
    return { value: Number(value), label: label.join(":") || `class ${index}` };
  });
  const isShare = classes.every(({ value }) => value >= 0 && value <= 1);
  const most = isShare ? 1 : Math.max(...classes.map(({ value }) => Math.abs(value)));
  const bars = element("div", { class: "bars" });
  for (const { value, label } of classes) {
    const meter = element("span", { class: "meter" });
    const filled = element("i");
    filled.style.width = `${(100 * Math.max(value, 0)) / (most || 1)}%`;
    meter.append(filled);
    bars.append(element("div", {}, element("span", { class: "label" }, label), meter,
      element("span", { class: "value" }, isShare ? `${(100 * value).toFixed(1)} %` : numberText(value))));
  }
  return bars;
}

function pixelsBlock(datatype, shape, elements) {
  const layout = datatype === "UINT8" ? pictureLayout({ datatype, shape }) : null;
  if (!layout || product(shape.slice(0, -3)) !== 1) return null;
  const { height, width, colors, first } = layout;
  const canvas = element("canvas", { width, height, class: "result" });
  const image = new ImageData(width, height);
  for (let place = 0; place < height * width; place++) {
    for (let color = 0; color < 3; color++) {
      const from = Math.min(color, colors - 1);
      image.data[4 * place + color] = elements[first ? from * height * width + place : place * colors + from];
    }
    image.data[4 * place + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Rows of numbers in columns, as wide as fits; of a long tensor, the beginning. A single row goes on in the next line.
function numbersText(shape, elements) {
  const perRow = shape.at(-1) ?? 1;
  const isRow = elements.length === perRow;
  const sample = Array.from(elements.slice(0, 64), numberText);
  const fitting = Math.max(3, Math.floor(LINE_MAX / (2 + Math.max(...sample.map((cell) => cell.length)))));
  const columns = Math.min(perRow, fitting);
  const step = isRow ? columns : perRow;
  const count = Math.min(Math.ceil(elements.length / step), isRow ? ROW_LINES_MAX : LINES_MAX);
  const rows = Array.from({ length: count }, (_, row) =>
    Array.from(elements.slice(row * step, Math.min(row * step + columns, elements.length)), numberText));
  const widths = Array.from({ length: columns }, (_, column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)));
  const lines = rows.map((row) => row.map((cell, column) => cell.padStart(widths[column])).join("  ") + (step > columns ? "  …" : ""));
  if (count * step < elements.length) lines.push("…");
  return lines.join("\n");
}

function summary(datatype, shape, elements) {
  if (datatype === "BOOL" || elements.length <= 16) return [];
  let least = elements[0];
  let most = elements[0];
  let at = 0;
  let sum = 0;
  for (let i = 0; i < elements.length; i++) {
    const value = elements[i];
    if (value < least) least = value;
    if (value > most) { most = value; at = i; }
    sum += Number(value);
  }
  const texts = [plural(elements.length, "element"), `least ${numberText(least)}`, `mean ${numberText(sum / elements.length)}`,
    `largest ${numberText(most)}${elements.length === shape.at(-1) ? ` at ${at}` : ""}`];
  return [element("p", { class: "note" }, texts.join(" · "))];
}

function timingTiles({ took, timing, first, count }) {
  const tiles = first === undefined
    ? [tile("Latency", durationText(took), "round trip")]
    : [tile("First response", durationText(first), "after the request"),
      tile("Responses", count.toLocaleString("en"), took === undefined ? "so far" : `in ${durationText(took)}`)];
  if (timing.batch !== undefined) {
    tiles.push(tile("Batch size", String(timing.batch), "that it ran in"),
      tile("Compute", durationText(timing.compute), `queue ${durationText(timing.queue)}`));
  } else if (first === undefined || count) {
    tiles.push(tile("Batch size", "none", "no model ran"));
  }
  return element("dl", { class: "tiles" }, ...tiles);
}

// Shows the responses of a stream as they come: text grows in one place, anything else is a list.
function streamView() {
  const tiles = element("div");
  const body = element("div", { class: "stream" });
  let text = null;
  let facts = { first: undefined, count: 0, timing: {} };
  const draw = () => tiles.replaceChildren(timingTiles(facts));
  return {
    element: element("div", {}, tiles, body),
    take(outputs, after, timing) {
      if (!facts.count) facts = { first: after, count: 0, timing };
      facts.count += 1;
      const only = outputs.length === 1 && outputs[0].datatype === "BYTES" && outputs[0].elements.length === 1 ? outputs[0] : null;
      const piece = only ? textOf(only.elements[0]) : null;
      if (piece !== null && (text || facts.count === 1)) {
        if (!text) {
          text = element("pre", { class: "text growing", tabindex: 0, "aria-live": "polite" });
          const head = element("div", { class: "fieldhead" }, element("span", { class: "name" }, only.name));
          body.append(element("div", { class: "output" }, head, text));
        }
        text.append(piece);
      } else {
        text = null;
        body.append(element("div", { class: "response" }, element("p", { class: "note" }, `Response ${facts.count}, after ${durationText(after)}`),
          ...outputs.map((output) => outputBlock(output, false))));
        if (body.children.length > RESPONSES_MAX) body.firstChild.remove();
      }
      draw();
    },
    cut() {
      text?.classList.remove("growing");
    },
    end(took) {
      if (!facts.count) body.append(element("p", { class: "note" }, "The stream ended without a response."));
      facts = { ...facts, took, first: facts.first ?? took };
      this.cut();
      draw();
    },
  };
}
