// Requests to the server. ACCESS, of the page that uses this, says what stands before each path and goes with each request.

const JSON_SIZE = "Inference-Header-Content-Length";

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...ACCESS.headers(), ...options.headers };
  let response;
  try {
    response = await fetch(ACCESS.base + path, { ...options, headers, credentials: ACCESS.credentials });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server cannot be reached.");
  }
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try {
      const { error } = JSON.parse(text.replace(/^data: /, ""));
      message = error?.message ?? error ?? text;  // in OpenAI's form, or in that of the other routes
    } catch { /* not ours */ }
    throw new Refusal(response.status, message || response.statusText);
  }
  return response;
}

async function askJson(path, options) {
  return (await ask(path, options)).json();
}

// The body of a request: JSON, then the bytes of the inputs. For code samples, files are only named.
function inferBody(inputs, parameters, { outputs = null, namesFiles = false } = {}) {
  const blobs = [];
  const entries = inputs.map(({ name, shape, datatype, elements, file }) => {
    if (file && namesFiles) return { name, shape, datatype, parameters: { file } };
    const blob = encode(datatype, elements);
    blobs.push(blob);
    return { name, shape, datatype, parameters: { binary_data_size: blob.size } };
  });
  const document = { inputs: entries };
  if (Object.keys(parameters).length) document.parameters = parameters;
  if (outputs) document.outputs = outputs;
  const head = new TextEncoder().encode(JSON.stringify(document));
  return {
    method: "POST",
    body: new Blob([head, ...blobs]),
    headers: { "Content-Type": "application/octet-stream", [JSON_SIZE]: String(head.length) },
  };
}

// How the server ran a request, by its own account: `queue` and `compute` in ms, `batch`. Missing without an execution.
function serverTiming(response) {
  const found = {};
  for (const part of (response.headers.get("Server-Timing") ?? "").split(",")) {
    const [name, value] = part.trim().split(/;dur=|;desc=/);
    if (value !== undefined) found[name] = Number(value);
  }
  return found;
}

async function infer(model, inputs, parameters, outputs, signal) {
  const request = inferBody(inputs, { ...parameters, binary_data_output: true }, { outputs });
  request.headers.Prefer = "server-timing";
  const begun = performance.now();
  const response = await ask(`${model.path}/infer`, { ...request, signal });
  const body = await response.arrayBuffer();
  const took = performance.now() - begun;
  const size = Number(response.headers.get(JSON_SIZE) ?? body.byteLength);
  const document = JSON.parse(new TextDecoder().decode(body.slice(0, size)));
  let at = size;
  const results = (document.outputs ?? []).map((output) => {
    const length = output.parameters?.binary_data_size;
    if (length === undefined) return { ...output, elements: fromJson(output) };
    at += length;
    return { ...output, elements: decode(output.datatype, body.slice(at - length, at)) };
  });
  return { took, timing: serverTiming(response), version: document.model_version, outputs: results };
}

// Calls `take` with each response as it comes, and when it came; returns how the first was run.
async function inferStream(model, inputs, parameters, signal, take) {
  const request = inferBody(inputs, parameters);
  Object.assign(request.headers, { Prefer: "server-timing", Accept: "text/event-stream" });
  const begun = performance.now();
  const response = await ask(`${model.path}/infer`, { ...request, signal });
  const timing = serverTiming(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const document = JSON.parse(event.replace(/^data: /, ""));
      if (document.error) throw new Refusal(0, document.error);
      const outputs = (document.outputs ?? []).map((output) => ({ ...output, elements: fromJson(output) }));
      take(outputs, performance.now() - begun, timing);
    }
  }
  return { took: performance.now() - begun, timing };
}

function fromJson({ datatype, data }) {
  return datatype === "BYTES" ? data.map((text) => new TextEncoder().encode(text)) : data;
}
