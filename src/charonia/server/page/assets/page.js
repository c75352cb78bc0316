// The page: the list of models, and one model with its signature, its form and its code.

const LOADING = ["LOADING", "UNLOADING"];
const EDITED_MS = 250;
const LOADING_MS = 1000;
const SOON_MS = 300;
const SURE_MS = 4000;
const FILTER_FROM = 9;

const byId = (id) => document.getElementById(id);
const problems = new Map();  // by name: why the last request to load or unload a model failed
const views = new Map();  // by name: the view of a model, kept with what was typed into it
let state = { entries: [], models: new Map(), document: null };

// ---- the server's state

async function refresh() {
  try {
    const [entries, document] = await Promise.all([
      askJson("v2/repository/index", { method: "POST", body: "{}" }), askJson("openapi.json")]);
    const models = new Map(document["x-models"].map((model) => [model.name, model]));
    state = { entries: grouped(entries), models, document };
    byId("gate").hidden = true;
    offerDocument(document);
    byId("content").hidden = false;
    draw();
  } catch (error) {
    fail(error);
  }
}

// A link carries no key: where one is needed, it leads to what was read with it.
function offerDocument(document) {
  if (!sessionStorage.getItem(KEY)) return;
  const link = byId("spec");
  if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([JSON.stringify(document, null, 2)], { type: "application/json" }));
  link.download = "openapi.json";
}

// One entry a model: with the state of its best version and the reasons of the others.
function grouped(entries) {
  const order = ["READY", "LOADING", "UNLOADING", "UNAVAILABLE", "UNKNOWN", ""];
  const found = new Map();
  for (const entry of entries) {
    const known = { name: entry.name, state: entry.state ?? "", reasons: [] };
    const model = found.get(entry.name) ?? known;
    if (order.indexOf(known.state) < order.indexOf(model.state)) model.state = known.state;
    if (entry.reason && entry.state !== "READY") model.reasons.push(entry.version ? `Version ${entry.version}: ${entry.reason}` : entry.reason);
    found.set(entry.name, model);
  }
  return [...found.values()].sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
}

function fail(error) {
  byId("content").hidden = true;
  byId("gate").hidden = false;
  const needsKey = error.status === 401;
  byId("keyform").hidden = !needsKey;
  byId("retry").hidden = needsKey;
  byId("gatetitle").textContent = needsKey ? "This server needs an API key" : "The models cannot be shown";
  const isWrong = needsKey && sessionStorage.getItem(KEY);
  byId("gatetext").textContent = needsKey && !isWrong ? "It stays in this tab, and is forgotten when you close it." : error.message;
  byId("gatetext").classList.toggle("problem", Boolean(isWrong) || !needsKey);
  if (needsKey) byId("key").focus();
}

const STATES = {
  READY: ["ready", "good"], LOADING: ["loading", "wait"], UNLOADING: ["unloading", "wait"],
  UNAVAILABLE: ["not available", "bad"], UNKNOWN: ["unknown", "off"], "": ["not loaded", "off"],
};

// ---- the list

function chosenName() {
  return decodeURIComponent(location.hash.slice(1));
}

function draw() {
  const { entries, document: about } = state;
  const ready = entries.filter((entry) => entry.state === "READY").length;
  byId("server").textContent = `${ready} of ${plural(entries.length, "model")} ready · version ${about.info.version}`;
  byId("filter").hidden = entries.length < FILTER_FROM;
  drawList();
  const name = chosenName();
  const isWide = matchMedia("(min-width: 761px)").matches;
  const shown = entries.find((entry) => entry.name === name) ?? (name || !isWide ? null : entries.find((entry) => entry.state === "READY") ?? entries[0]);
  document.body.classList.toggle("chosen", Boolean(shown || name));
  byId("list").querySelectorAll("a").forEach((link) =>
    link.dataset.name === shown?.name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
  document.title = shown ? `${shown.name} · Charonia` : "Charonia";
  if (shown) byId("model").replaceChildren(viewOf(shown));
  else if (name) byId("model").replaceChildren(notice("No such model", `This server has no model named ${name}.`));
  else if (!entries.length) byId("model").replaceChildren(notice("No models", "The repositories of this server are empty."));
  clearTimeout(draw.again);
  if (entries.some((entry) => LOADING.includes(entry.state))) draw.again = setTimeout(refresh, LOADING_MS);
}

function drawList() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const links = state.entries.filter((entry) => entry.name.toLowerCase().includes(wanted)).map((entry) => {
    const [text, kind] = STATES[entry.state];
    const model = state.models.get(entry.name);
    return element("li", {}, element("a", { href: `#${encodeURIComponent(entry.name)}`, "data-name": entry.name },
      element("span", { class: `dot ${kind}`, title: text }), element("span", { class: "name" }, ...breakable(entry.name)),
      element("span", { class: "kind" }, model && entry.state === "READY" ? kindOf(model) : text)));
  });
  byId("list").replaceChildren(...(links.length ? links : [element("li", { class: "note" }, "No model has this name.")]));
}

function kindOf(model) {
  return model.ensemble.length ? "ensemble" : model.backend;
}

function notice(title, text) {
  return element("section", {}, element("h2", {}, title), element("p", { class: "about" }, text));
}

// ---- one model

function viewOf(entry) {
  const model = state.models.get(entry.name);
  const signature = JSON.stringify([entry, model, problems.get(entry.name), mayControl()]);
  if (views.get(entry.name)?.signature !== signature) views.set(entry.name, { signature, element: makeView(entry, model) });
  return views.get(entry.name).element;
}

function mayControl() {
  return state.document["x-model-control"];
}

async function control(name, action) {
  problems.delete(name);
  const soon = setTimeout(refresh, SOON_MS);
  try {
    await ask(`v2/repository/models/${encodeURIComponent(name)}/${action}`, { method: "POST", body: "{}" });
  } catch (error) {
    problems.set(name, error.message);
  }
  clearTimeout(soon);
  await refresh();
}

// Load, or reload and unload; unloading takes a second press, since clients may be using the model.
function controls(entry) {
  if (!mayControl() || LOADING.includes(entry.state)) return [];
  const group = element("div", { class: "controls" });
  const button = (kind, text, busyText, action) => {
    const made = element("button", { type: "button", class: kind, click: async () => {
      const all = group.querySelectorAll("button");
      all.forEach((one) => { one.disabled = true; });
      made.textContent = busyText;
      await control(entry.name, action);
      all.forEach((one) => { one.disabled = false; });
      made.textContent = text;
    } }, text);
    return made;
  };
  if (entry.state !== "READY") group.append(button("primary", "Load", "Loading …", "load"));
  else {
    const sure = button("danger", "Unload it now", "Unloading …", "unload");
    const first = element("button", { type: "button", click: () => {
      first.replaceWith(sure);
      sure.focus();
      setTimeout(() => { if (!sure.disabled) sure.replaceWith(first); }, SURE_MS);
    } }, "Unload");
    group.append(button("", "Reload", "Reloading …", "load"), first);
  }
  return [group];
}

function makeView(entry, model) {
  const [text, kind] = STATES[entry.state];
  const head = element("header", {}, element("a", { class: "back", href: "#" }, "‹ Models"),
    element("div", { class: "headline" }, element("h1", {}, ...breakable(entry.name), " ", badge(text, kind)), ...controls(entry)));
  const parts = [head];
  const problem = problems.get(entry.name);
  if (problem && (entry.state === "READY" || !entry.reasons.length))
    parts.push(element("section", { role: "alert" }, element("h2", {}, "The server refused"), element("pre", { class: "text", tabindex: 0 }, problem)));
  if (entry.reasons.length)
    parts.push(element("section", {}, element("h2", {}, entry.state === "READY" ? "Versions that are not available" : "Why it is not available"),
      ...entry.reasons.map((reason) => element("pre", { class: "text", tabindex: 0 }, reason))));
  if (!model) {
    if (!entry.reasons.length) parts.push(notice("Not loaded", LOADING.includes(entry.state)
      ? "It can be tried as soon as it is ready." : "Its inputs and outputs are known when it is loaded."));
    return element("div", {}, ...parts);
  }
  head.append(element("p", { class: "about" }, ...aboutModel(model)));
  if (model.openai.includes(CHAT_ROUTE)) parts.push(chatSection(model));
  parts.push(signatureSection(model), ...trySections(model));
  return element("div", {}, ...parts);
}

function aboutModel(model) {
  const facts = [kindOf(model), `version${model.versions.length > 1 ? "s" : ""} ${model.versions.join(", ")}`];
  if (model.max_batch_size > 0) facts.push(`batches of up to ${model.max_batch_size}${model.batching ? ", made by the server" : ""}`);
  if (model.stream) facts.push("stream of responses");
  if (model.sequence) facts.push("sequences");
  const shown = facts.map((fact) => element("span", {}, fact));
  if (model.ensemble.length) {
    const steps = [...new Set(model.ensemble)].flatMap((name, place) =>
      [place ? ", " : "", element("a", { href: `#${encodeURIComponent(name)}` }, ...breakable(name))]);
    shown.push(element("span", {}, "runs ", ...steps));
  }
  return shown;
}

function signatureSection(model) {
  const rows = (tensors) => tensors.map((tensor) => element("tr", {},
    element("th", { scope: "row" }, ...breakable(tensor.name), tensor.optional ? element("small", {}, " optional") : ""),
    element("td", {}, tensor.datatype), element("td", {}, shapeText(tensor.shape, model.max_batch_size))));
  const table = (title, tensors) => element("div", {}, element("h3", {}, title),
    tensors.length ? element("table", {}, element("tbody", {}, ...rows(tensors))) : element("p", { class: "note" }, "None"));
  return element("section", { class: "signature" }, table("Inputs", model.inputs), table("Outputs", model.outputs));
}

function trySections(model) {
  const code = codeSection(model);
  const answer = element("div", { class: "answer" }, element("p", { class: "empty" }, "The answer appears here."));
  let edited;
  const changed = () => {
    clearTimeout(edited);
    edited = setTimeout(async () => code.update(await readForm().catch(() => null), version.chosen()), EDITED_MS);
  };
  const version = versionField(model, changed);
  const fields = model.inputs.map((spec) => inputField(spec, model.max_batch_size, changed));
  const options = optionFields(model, changed);
  const readForm = async () => {
    const inputs = await Promise.all(fields.map((field) => field.read()));
    return { inputs: inputs.filter((input) => input !== null), parameters: options.read() };
  };
  const send = element("button", { type: "submit", class: "primary" }, model.stream ? "Run and stream" : "Run");
  const stop = element("button", { type: "button", hidden: true }, "Stop");
  const form = element("form", { novalidate: true, autocomplete: "off" }, ...version.elements, ...fields.map((field) => field.element), options.element,
    element("div", { class: "actions" }, send, stop, element("span", { class: "note" }, "Ctrl + Enter")));
  form.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (send.disabled) return;
    let request;
    try { request = await readForm(); } catch { return; }  // the field says why
    const abort = new AbortController();
    stop.onclick = () => abort.abort();
    send.disabled = true;
    stop.hidden = false;
    answer.classList.add("busy");
    answer.setAttribute("aria-busy", "true");
    try {
      await run({ ...model, path: model.path + pathOf(version.chosen()) }, request, options.classes(), abort.signal, answer);
      options.sent();
    } catch (error) {
      showError(answer, error, abort.signal.aborted);
    }
    answer.classList.remove("busy");
    answer.removeAttribute("aria-busy");
    send.disabled = false;
    stop.hidden = true;
  });
  const both = element("section", { class: "try" }, element("div", {}, element("h2", {}, "Try it"), form),
    element("div", {}, element("h2", {}, "Answer"), answer));
  return [both, code.element];
}

function pathOf(version) {
  return version ? `/versions/${version}` : "";
}

// Which version answers, where there are several.
function versionField(model, changed) {
  if (model.versions.length < 2) return { elements: [], chosen: () => "" };
  const newestFirst = [...model.versions].reverse();
  const select = element("select", { "aria-label": "Version", change: changed },
    element("option", { value: "" }, `newest (${newestFirst[0]})`), ...newestFirst.slice(1).map((number) => element("option", { value: number }, number)));
  return {
    elements: [element("div", { class: "field" }, element("div", { class: "fieldhead" }, element("span", { class: "name" }, "Version"), select))],
    chosen: () => select.value,
  };
}

async function run(model, { inputs, parameters }, classes, signal, answer) {
  if (model.stream) {
    const view = streamView();
    let isShown = false;
    const show = () => {
      if (!isShown) answer.replaceChildren(view.element);
      isShown = true;
    };
    try {
      const { took } = await inferStream(model, inputs, parameters, signal, (...response) => { show(); view.take(...response); });
      show();
      view.end(took);
    } catch (error) {
      view.cut();
      error.keepsAnswer = isShown;
      throw error;
    }
    return;
  }
  const outputs = classes.size ? model.outputs.map(({ name }) => classes.has(name)
    ? { name, parameters: { classification: TOP, binary_data: true } } : { name, parameters: { binary_data: true } }) : null;
  const result = await infer(model, inputs, parameters, outputs, signal);
  answer.replaceChildren(timingTiles(result), ...result.outputs.map((output) => outputBlock(output, classes.has(output.name))));
}

function showError(answer, error, isStopped) {
  const shown = isStopped
    ? element("p", { class: "note" }, "Stopped: the server dropped the request.")
    : element("div", { class: "failed", role: "alert" }, badge(error.status ? `status ${error.status}` : "failed", "bad"),
      element("pre", { class: "text", tabindex: 0 }, error.message));
  if (error.keepsAnswer) answer.append(shown);
  else answer.replaceChildren(shown);
}

// Sequences, classes and request parameters, as far as the model has them.
function optionFields(model, changed) {
  const parts = [];
  const id = element("input", { type: "text", inputmode: "numeric", value: "1", input: changed, "aria-label": "Sequence id" });
  const start = element("input", { type: "checkbox", change: changed });
  const end = element("input", { type: "checkbox", change: changed });
  start.checked = end.checked = true;
  if (model.sequence)
    parts.push(element("div", { class: "field" }, element("div", { class: "fieldhead" }, element("span", { class: "name" }, "Sequence")),
      element("div", { class: "pair" }, element("label", {}, "Id ", id), element("label", { class: "inline" }, start, "first request"),
        element("label", { class: "inline" }, end, "last request"))));
  const labelled = model.outputs.filter((output) => output.labels && !model.stream);
  const boxes = labelled.map(({ name }) => {
    const box = element("input", { type: "checkbox" });
    box.checked = true;
    parts.push(element("label", { class: "inline" }, box, `The top ${TOP} classes of ${name}`));
    return [name, box];
  });
  const problem = element("p", { class: "problem", role: "alert", hidden: true });
  const parameters = element("textarea", { rows: 2, spellcheck: "false", placeholder: '{"temperature": 0.7}', "aria-label": "Request parameters", input: () => {
    problem.hidden = true;
    changed();
  } });
  parts.push(element("details", {}, element("summary", {}, "Request parameters"), parameters, problem));
  return {
    element: element("div", { class: "options" }, ...parts),
    read() {
      let found = {};
      if (parameters.value.trim()) {
        try {
          found = JSON.parse(parameters.value);
          if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("expected an object");
        } catch (error) {
          problem.textContent = `Not a JSON object: ${error.message}`;
          problem.hidden = false;
          throw error;
        }
      }
      if (model.sequence) {
        const number = Number(id.value);
        Object.assign(found, { sequence_id: Number.isSafeInteger(number) ? number : id.value, sequence_start: start.checked, sequence_end: end.checked });
      }
      return found;
    },
    classes: () => new Set(boxes.filter(([, box]) => box.checked).map(([name]) => name)),
    sent() {  // the next request belongs to the same sequence, unless this one was its last
      if (model.sequence) start.checked = end.checked;
    },
  };
}

// ---- code

function codeSection(model) {
  let samples = model.samples;
  let chosen = samples[0]?.label;
  const tabs = element("div");
  const source = element("pre", { tabindex: 0 });
  const draw = () => {
    if (!samples.some((sample) => sample.label === chosen)) chosen = samples[0]?.label;
    const place = samples.findIndex((sample) => sample.label === chosen);
    tabs.replaceChildren(choice("Language", samples.map((sample) => sample.label), place, (pressed) => {
      chosen = samples[pressed].label;
      source.textContent = samples[pressed].source;
    }));
    source.textContent = samples[place]?.source ?? "This request can only be sent from the form.";
  };
  draw();
  const bar = element("div", { class: "codebar" }, tabs, copyButton(() => source.textContent));
  let latest = 0;
  return {
    element: element("section", { class: "code" }, element("h2", {}, "The same request as code"), bar, source),
    async update(request, version) {
      const turn = ++latest;
      if (!request) return;
      try {
        const made = await askJson(`samples/${encodeURIComponent(model.name)}${pathOf(version)}`, inferBody(request.inputs, request.parameters, { namesFiles: true }));
        if (turn !== latest) return;
        samples = made;
        draw();
      } catch { /* the form's own request will say what is wrong */ }
    },
  };
}

// ---- start

byId("keyform").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  refresh();
});
byId("retry").addEventListener("click", refresh);
byId("filter").addEventListener("input", () => { drawList(); draw(); });
addEventListener("hashchange", () => { draw(); scrollTo(0, 0); });
addEventListener("focus", () => { if (!byId("content").hidden) refresh(); });
refresh();
