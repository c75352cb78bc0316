// Elements, and the texts in them. Text from models and servers is only ever inserted as text.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Buttons of which one is pressed.
function choice(label, texts, chosen, change) {
  const group = element("div", { class: "choices", role: "group", "aria-label": label });
  const buttons = texts.map((text, place) =>
    element("button", { type: "button", "aria-pressed": String(place === chosen), click: () => press(place) }, text));
  const press = (place) => {
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === place)));
    change(place);
  };
  group.append(...buttons);
  return group;
}

// A name that may break after its separators.
function breakable(name) {
  return name.split(/(?<=[_.\-/:])/).flatMap((part, place) => (place ? [element("wbr"), part] : [part]));
}

function badge(text, kind) {
  return element("span", { class: `badge ${kind}` }, text);
}

function tile(name, value, below = "") {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "below" }, below));
}

function numberText(value) {
  if (typeof value === "bigint" || Number.isInteger(value)) return value.toString();
  if (!Number.isFinite(value)) return String(value);
  return Math.abs(value) < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(6)));
}

function durationText(ms) {
  for (const [size, unit] of [[1000, "s"], [1, "ms"]])
    if (ms >= 0.9995 * size) return `${Number((ms / size).toPrecision(3))} ${unit}`;
  return `${Number((ms * 1000).toPrecision(3))} µs`;
}

function sizeText(bytes) {
  for (const [size, unit] of [[1e6, "MB"], [1e3, "kB"]])
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return bytes === 1 ? "1 byte" : `${bytes} bytes`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function shapeText(shape, maxBatchSize = 0) {
  if (!shape.length) return "scalar";
  return shape.map((dim, place) => (dim !== -1 ? dim : place === 0 && maxBatchSize > 0 ? "batch" : "n")).join(" × ");
}

function copyButton(text) {
  const button = element("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {  // the clipboard belongs to pages from https or this machine: select the text instead
      const selected = button.closest(".code").querySelector("pre");
      getSelection().selectAllChildren(selected);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
