// Tensors: from what people type and from files, to the bytes of the protocol and back.

const NUMBERS = {
  UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array,
  INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array,
  FP32: Float32Array, FP64: Float64Array, BOOL: Uint8Array, FP16: Uint16Array, BF16: Uint16Array,
};

const isFloat = (datatype) => ["FP16", "BF16", "FP32", "FP64"].includes(datatype);

const product = (shape) => shape.reduce((all, dim) => all * dim, 1);

// Elements and, where they are in brackets, their shape: `1, 2 3`, `[[1, 2], [3, 4]]`, `true false`.
function parseValues(text, datatype) {
  const tokens = text.match(/[[\]]|[^\s,[\]]+/g) ?? [];
  if (!tokens.length) throw new Error("enter a value");
  if (tokens[0] !== "[") return { shape: null, elements: tokens.map((token) => parseElement(token, datatype)) };
  const elements = [];
  const shape = [];
  const open = [];  // the number of members of each open bracket
  tokens.forEach((token, place) => {
    if (token === "[") {
      if (open.length) open[open.length - 1] += 1;
      else if (place) throw new Error("there is something after the last bracket");
      open.push(0);
    } else if (token === "]") {
      if (!open.length) throw new Error("there is a ] without its [");
      const depth = open.length - 1;
      const count = open.pop();
      if (shape[depth] !== undefined && shape[depth] !== count)
        throw new Error(`rows differ in length: ${shape[depth]} and ${count}`);
      shape[depth] = count;
    } else {
      if (!open.length) throw new Error("there is something after the last bracket");
      open[open.length - 1] += 1;
      elements.push(parseElement(token, datatype));
    }
  });
  if (open.length) throw new Error("a bracket is not closed");
  if (product(shape) !== elements.length) throw new Error("numbers and rows are mixed");
  return { shape, elements };
}

function parseElement(token, datatype) {
  if (datatype === "BOOL") {
    if (/^(true|1)$/i.test(token)) return 1;
    if (/^(false|0)$/i.test(token)) return 0;
    throw new Error(`expected true or false, got ${token}`);
  }
  if (isFloat(datatype)) {
    const named = { nan: NaN, inf: Infinity, "+inf": Infinity, "-inf": -Infinity, infinity: Infinity, "-infinity": -Infinity };
    const value = named[token.toLowerCase()] ?? Number(token);
    if (Number.isNaN(value) && !/^nan$/i.test(token)) throw new Error(`expected a number, got ${token}`);
    return value;
  }
  if (!/^[+-]?\d+$/.test(token)) throw new Error(`expected a whole number, got ${token}`);
  const value = BigInt(token);
  const bits = BigInt(8 * NUMBERS[datatype].BYTES_PER_ELEMENT);
  const [low, high] = datatype.startsWith("U") ? [0n, 2n ** bits - 1n] : [-(2n ** (bits - 1n)), 2n ** (bits - 1n) - 1n];
  if (value < low || value > high) throw new Error(`${token} does not fit ${datatype}: ${low} to ${high}`);
  return value;
}

// The shape of so many elements: as given, else the last variable dimension takes them all and the others are 1.
function fitShape(declared, given, count) {
  const fits = (shape) => shape.length === declared.length && shape.every((dim, i) => declared[i] === -1 || declared[i] === dim);
  if (given && fits(given)) return given;
  if (given && given.length > 1)
    throw new Error(`the shape is ${shapeText(given)}, expected ${shapeText(declared)}`);
  const fixed = product(declared.filter((dim) => dim !== -1));
  const last = declared.lastIndexOf(-1);
  if (fixed ? count % fixed || (last === -1 && count !== fixed) : count)
    throw new Error(`${plural(count, "element")} do not fit ${shapeText(declared)}`);
  return declared.map((dim, i) => (dim !== -1 ? dim : i === last && fixed ? count / fixed : 1));
}

function parseShape(text, declared) {
  const shape = (text.match(/\d+/g) ?? []).map(Number);
  if (shape.length !== declared.length || shape.some((dim, i) => declared[i] !== -1 && declared[i] !== dim))
    throw new Error(`the shape has to be ${shapeText(declared)}, with numbers for n and batch`);
  return shape;
}

function encode(datatype, elements) {
  if (datatype === "BYTES") {
    const parts = [];
    for (const part of elements) parts.push(new Uint32Array([part.length]), part);
    return new Blob(parts);
  }
  const array = new NUMBERS[datatype](elements.length);
  const wide = array instanceof BigInt64Array || array instanceof BigUint64Array;
  for (let i = 0; i < elements.length; i++) {
    const value = elements[i];
    if (datatype === "FP16") array[i] = toHalf(value);
    else if (datatype === "BF16") array[i] = toBrain(value);
    else array[i] = wide ? BigInt(value) : Number(value);
  }
  return new Blob([array]);
}

function decode(datatype, buffer) {
  if (datatype === "BYTES") {
    const view = new DataView(buffer);
    const found = [];
    for (let at = 0; at < buffer.byteLength;) {
      const size = view.getUint32(at, true);
      found.push(new Uint8Array(buffer, at + 4, size));
      at += 4 + size;
    }
    return found;
  }
  const array = new NUMBERS[datatype](buffer);
  if (datatype === "FP16") return Float32Array.from(array, fromHalf);
  if (datatype === "BF16") return Float32Array.from(array, fromBrain);
  return datatype === "BOOL" ? Array.from(array, Boolean) : array;
}

const float = new Float32Array(1);
const bits = new Uint32Array(float.buffer);

// Rounds to the nearest, ties to even.
function toBrain(value) {
  float[0] = value;
  return Number.isNaN(float[0]) ? 0x7fc0 : (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) >>> 16;
}

function fromBrain(half) {
  bits[0] = half << 16;
  return float[0];
}

function toHalf(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(size)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const exponent = Math.max(Math.floor(Math.log2(size || 1e-30)), -14);
  const scaled = size / 2 ** (exponent - 10);
  const rounded = scaled % 1 === 0.5 ? 2 * Math.round(scaled / 2) : Math.round(scaled);
  // With the hidden bit left in, a fraction that is rounded up carries into the exponent.
  return sign | (((exponent + 14) << 10) + rounded);
}

function fromHalf(half) {
  const exponent = (half >> 10) & 0x1f;
  const fraction = half & 0x3ff;
  const size = exponent === 31 ? (fraction ? NaN : Infinity)
    : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return half & 0x8000 ? -size : size;
}

const NPY = {
  b1: "BOOL", u1: "UINT8", u2: "UINT16", u4: "UINT32", u8: "UINT64", i1: "INT8", i2: "INT16", i4: "INT32", i8: "INT64",
  f2: "FP16", f4: "FP32", f8: "FP64",
};

const isNpy = (bytes) => bytes.length > 10 && bytes[0] === 0x93 && String.fromCharCode(...bytes.subarray(1, 6)) === "NUMPY";

// An array in numpy's format.
function readNpy(buffer) {
  const bytes = new Uint8Array(buffer);
  const view = new DataView(buffer);
  const start = bytes[6] === 1 ? 10 : 12;
  const size = bytes[6] === 1 ? view.getUint16(8, true) : view.getUint32(8, true);
  const header = new TextDecoder("latin1").decode(bytes.subarray(start, start + size));
  const kind = /'descr':\s*'([<|=>])([a-z]\d)'/.exec(header);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(header);
  if (!kind || !shape || !NPY[kind[2]] || kind[1] === ">" || /'fortran_order':\s*True/.test(header))
    throw new Error("the .npy file has to hold numbers, little-endian and in C order");
  return {
    shape: (shape[1].match(/\d+/g) ?? []).map(Number),
    elements: Array.from(decode(NPY[kind[2]], buffer.slice(start + size)), Number),
  };
}
