// A field for each input: numbers, text, pictures, files.

const SHOWN_MAX = 1024;  // elements that are written out in a field

const PICTURE_NAME = /image|img|picture|photo|frame|jpe?g|png/i;

// The places of height, width and colours in the shape of a picture, null for anything else.
function pictureLayout({ datatype, shape }) {
  if (shape.length < 3 || !["UINT8", "FP16", "BF16", "FP32"].includes(datatype)) return null;
  const [a, b, c] = shape.slice(-3);
  const isSide = (dim) => dim === -1 || dim >= 8;
  if ([1, 3].includes(c) && isSide(a) && isSide(b)) return { height: a, width: b, colors: c, first: false };
  if ([1, 3].includes(a) && isSide(b) && isSide(c)) return { height: b, width: c, colors: a, first: true };
  return null;
}

const SCALES = {
  "0 to 1": (value) => value / 255,
  "0 to 255": (value) => value,
  "-1 to 1": (value) => value / 127.5 - 1,
  "ImageNet mean and deviation": (value, color) =>
    (value / 255 - [0.485, 0.456, 0.406][color]) / [0.229, 0.224, 0.225][color],
};

async function readPicture(file, spec, layout, scale) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is not a picture that this browser can read`);
  });
  // A side that is free follows the other one.
  const ratio = bitmap.width / bitmap.height;
  const isFree = layout.height === -1 && layout.width === -1;
  const height = layout.height !== -1 ? layout.height : isFree ? bitmap.height : Math.max(1, Math.round(layout.width / ratio));
  const width = layout.width !== -1 ? layout.width : isFree ? bitmap.width : Math.max(1, Math.round(layout.height * ratio));
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height).data;
  const { colors, first } = layout;
  const elements = new Float32Array(height * width * colors);
  for (let place = 0; place < height * width; place++) {
    for (let color = 0; color < colors; color++) {
      const at = 4 * place;
      const value = colors === 1 ? 0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2] : pixels[at + color];
      elements[first ? color * height * width + place : place * colors + color] =
        spec.datatype === "UINT8" ? Math.round(value) : scale(value, color);
    }
  }
  const lead = spec.shape.slice(0, -3).map((dim) => (dim === -1 ? 1 : dim));
  return { shape: [...lead, ...(first ? [colors, height, width] : [height, width, colors])], elements };
}

async function readFile(file, spec) {
  const buffer = await file.arrayBuffer();
  const bytes = new Uint8Array(buffer);
  const text = () => new TextDecoder().decode(bytes);
  if (spec.datatype === "BYTES") return { shape: fitShape(spec.shape, null, 1), elements: [bytes] };
  if (isNpy(bytes)) {
    const { shape, elements } = readNpy(buffer);
    return { shape: fitShape(spec.shape, shape, elements.length), elements };
  }
  if (/\.(json|txt|csv)$/i.test(file.name)) {
    const { shape, elements } = parseValues(text(), spec.datatype);
    return { shape: fitShape(spec.shape, shape, elements.length), elements };
  }
  const size = NUMBERS[spec.datatype].BYTES_PER_ELEMENT;
  if (buffer.byteLength % size) throw new Error(`${file.name}: its size is not a multiple of ${size} bytes`);
  const elements = decode(spec.datatype, buffer);
  return { shape: fitShape(spec.shape, null, elements.length), elements };
}

// The ways to fill in an input: each makes its controls, and reads them as { shape, elements, file }.

function textWay(spec, changed) {
  const field = element("textarea", { rows: 2, spellcheck: "false", input: changed, "aria-label": spec.name });
  field.value = spec.example?.data?.[0] ?? spec.example?.fill ?? "";
  return {
    title: "Text",
    controls: [field],
    read: () => ({ shape: fitShape(spec.shape, null, 1), elements: [new TextEncoder().encode(field.value)] }),
  };
}

function linesWay(spec, changed) {
  const field = element("textarea", { rows: 3, spellcheck: "false", input: changed, "aria-label": `${spec.name}, one element a line` });
  const { data, fill, shape } = spec.example ?? {};
  field.value = (data ?? Array(fill === undefined ? 0 : Math.min(product(shape), SHOWN_MAX)).fill(fill)).join("\n");
  return {
    title: "Lines",
    note: "One element a line",
    controls: [field],
    read: () => {
      const elements = field.value.split("\n").map((line) => new TextEncoder().encode(line));
      return { shape: fitShape(spec.shape, null, elements.length), elements };
    },
  };
}

function nested(shape, data) {
  if (!shape.length) return String(data[0] ?? "");
  const size = data.length / shape[0];
  if (shape.length === 1) return `[${data.join(", ")}]`;
  const rows = Array.from({ length: shape[0] }, (_, row) => nested(shape.slice(1), data.slice(row * size, (row + 1) * size)));
  return `[${rows.join(shape.length === 2 && shape[0] > 1 ? ",\n " : ", ")}]`;
}

function valuesWay(spec, changed) {
  const { shape, data } = spec.example ?? { shape: [], data: [] };
  const text = data ? (data.length === 1 ? String(data[0]) : nested(shape, data)) : "";
  const isOne = product(spec.shape.map(Math.abs)) === 1;
  const field = isOne
    ? element("input", { type: "text", inputmode: "decimal", autocomplete: "off", input: changed, "aria-label": spec.name })
    : element("textarea", { rows: Math.min(1 + text.split("\n").length + Math.floor(text.length / 60), 6), spellcheck: "false", input: changed, "aria-label": spec.name });
  field.value = text;
  return {
    title: "Values",
    controls: [field],
    read: () => {
      const { shape, elements } = parseValues(field.value, spec.datatype);
      return { shape: fitShape(spec.shape, shape, elements.length), elements };
    },
  };
}

function fillWay(spec, changed) {
  const value = element("input", { type: "text", autocomplete: "off", input: changed, "aria-label": `Value of all elements of ${spec.name}` });
  const shape = element("input", { type: "text", autocomplete: "off", input: changed, "aria-label": `Shape of ${spec.name}` });
  value.value = spec.example?.fill ?? spec.example?.data?.[0] ?? "0";
  shape.value = (spec.example?.shape ?? spec.shape.map((dim) => (dim === -1 ? 1 : dim))).join(" × ");
  return {
    title: "One value",
    showsShape: true,
    controls: [element("div", { class: "pair" },
      element("label", {}, "Value ", value), element("label", {}, "Shape ", shape))],
    read: () => {
      const made = parseShape(shape.value, spec.shape);
      return { shape: made, elements: Array(product(made)).fill(parseElement(value.value.trim(), spec.datatype)) };
    },
  };
}

function chooser(spec, accept, chosen) {
  const input = element("input", { type: "file", accept, "aria-label": `File for ${spec.name}`, change: () => take(input.files[0]) });
  const name = element("span", { class: "about" }, "or drop it here");
  const preview = element("img", { class: "preview", alt: "", hidden: true });
  const zone = element("label", { class: "drop" }, preview, element("span", { class: "button" }, "Choose a file"), name, input);
  let file = null;
  const take = (taken) => {
    if (!taken) return;
    file = taken;
    name.textContent = `${file.name}, ${sizeText(file.size)}`;
    preview.hidden = !file.type.startsWith("image/");
    if (preview.src) URL.revokeObjectURL(preview.src);
    if (!preview.hidden) preview.src = URL.createObjectURL(file);
    chosen();
  };
  for (const event of ["dragover", "drop"])
    zone.addEventListener(event, (dragged) => {
      dragged.preventDefault();
      if (event === "drop") take(dragged.dataTransfer.files[0]);
    });
  return { zone, file: () => { if (!file) throw new Error("choose a file"); return file; } };
}

function fileWay(spec, changed) {
  const picked = chooser(spec, "", changed);
  return {
    title: "File",
    note: spec.datatype === "BYTES" ? "The bytes of the file are one element" : ".npy, .json, or raw little-endian bytes",
    controls: [picked.zone],
    read: async () => ({ ...await readFile(picked.file(), spec), file: picked.file().name }),
  };
}

function sizeNote({ width, height }) {
  if (width === -1 && height === -1) return "In its own size";
  if (width === -1) return `Scaled to a height of ${height} pixels`;
  return height === -1 ? `Scaled to a width of ${width} pixels` : `Scaled to ${width} × ${height} pixels`;
}

function pictureWay(spec, layout, changed) {
  const picked = chooser(spec, "image/*", changed);
  const scale = element("select", { change: changed }, ...Object.keys(SCALES).map((text) => element("option", {}, text)));
  const controls = [picked.zone];
  if (spec.datatype !== "UINT8") controls.push(element("label", { class: "inline" }, "Colours from ", scale));
  return {
    title: "Picture",
    note: sizeNote(layout),
    controls,
    read: async () => ({ ...await readPicture(picked.file(), spec, layout, SCALES[scale.value]), file: picked.file().name }),
  };
}

function waysOf(spec, maxBatchSize, changed) {
  const ways = [];
  if (spec.datatype === "BYTES") {
    const isOne = product(spec.shape.map(Math.abs)) === 1;
    if (isOne) ways.push(textWay(spec, changed));
    if (!isOne || spec.shape.includes(-1)) ways.push(linesWay(spec, changed));
    ways.push(fileWay(spec, changed));
    const chosen = isOne && PICTURE_NAME.test(spec.name) ? ways.length - 1 : 0;
    return [ways, chosen];
  }
  const layout = pictureLayout(spec);
  const isLong = spec.example?.fill !== undefined;
  if (!isLong) ways.push(valuesWay(spec, changed));
  if (isLong || spec.shape.slice(maxBatchSize > 0 ? 1 : 0).includes(-1)) ways.push(fillWay(spec, changed));
  if (layout) ways.push(pictureWay(spec, layout, changed));
  ways.push(fileWay(spec, changed));
  return [ways, 0];
}

// The field of an input. `read` returns the input, or null for an optional one that is left out.
function inputField(spec, maxBatchSize, changed) {
  const [ways, first] = waysOf(spec, maxBatchSize, () => field.changed());
  const body = element("div", { class: "way" });
  const shape = element("span", { class: "shape" });
  const problem = element("p", { class: "problem", role: "alert", hidden: true });
  const head = element("div", { class: "fieldhead" }, element("span", { class: "name" }, spec.name),
    element("span", { class: "type" }, `${spec.datatype} ${shapeText(spec.shape, maxBatchSize)}`));
  let way = ways[first];
  let isSent = !spec.optional || spec.example !== null;
  const field = {
    async read() {
      if (!isSent) return null;
      try {
        const read = await way.read();
        shape.textContent = way.showsShape || read.shape.join() === spec.shape.join() ? "" : `Sent as ${shapeText(read.shape)}`;
        problem.hidden = true;
        return { name: spec.name, datatype: spec.datatype, ...read };
      } catch (error) {
        shape.textContent = "";
        field.complain(error.message);
        throw error;
      }
    },
    complain(message) {
      problem.textContent = message;
      problem.hidden = false;
    },
    changed() {
      problem.hidden = true;
      changed();
    },
  };
  const show = (place) => {
    way = ways[place];
    body.replaceChildren(...way.controls, ...(way.note ? [element("p", { class: "note" }, way.note)] : []));
  };
  show(first);
  const picks = ways.length > 1
    ? choice(`How to fill in ${spec.name}`, ways.map((each) => each.title), first, (place) => { show(place); field.changed(); }) : "";
  if (spec.optional) {
    const box = element("input", { type: "checkbox", change: () => { send(box.checked); field.changed(); } });
    const send = (is) => { isSent = is; body.hidden = picks.hidden = !is; };
    box.checked = isSent;
    send(isSent);
    head.append(element("label", { class: "inline optional" }, box, "send"));
  }
  head.append(picks);
  field.element = element("div", { class: "field" }, head, body, shape, problem);
  return field;
}
