// The page: the list of models, and one model with its signature, its form and its code.

const LOADING = ["LOADING", "UNLOADING"];
const LOADING_MS = 1000;
const SOON_MS = 300;
const SURE_MS = 4000;
const LIVE_MS = 2000;
const FILTER_FROM = 9;

const KEY = "charonia-key";

// All requests are relative to the page, so that a proxy may serve it under a path.
const ACCESS = {
  base: "",
  credentials: "omit",
  headers() {
    const key = sessionStorage.getItem(KEY);  // of this tab only, until it is closed
    return key ? { Authorization: `Bearer ${key}` } : {};
  },
};

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
  const metricsPort = about["x-metrics-port"];
  byId("metrics").hidden = !metricsPort;
  if (metricsPort) byId("metrics").href = Object.assign(new URL("/metrics", location.origin), { protocol: "http:", port: metricsPort }).href;
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
  updateLive();
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
  if (views.get(entry.name)?.signature !== signature) {
    const live = model ? liveSection(model, stateOf) : null;
    views.set(entry.name, { signature, live, element: makeView(entry, model, live) });
  }
  return views.get(entry.name).element;
}

function stateOf(name) {
  return STATES[state.entries.find((entry) => entry.name === name)?.state ?? ""];
}

// Only of the model that is looked at.
function updateLive() {
  if (document.visibilityState !== "visible") return;
  for (const { live } of views.values()) if (live?.element.isConnected) live.update();
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

function makeView(entry, model, live) {
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
  if (model.openai.includes(CHAT_ROUTE)) {
    const others = [...state.models.values()].filter((other) => other !== model && other.openai.includes(CHAT_ROUTE));
    parts.push(chatSection(model, others.map((other) => other.name)));
  }
  parts.push(live.element, signatureSection(model), ...trySections(model));
  return element("div", {}, ...parts);
}

function aboutModel(model) {
  const facts = [kindOf(model), `version${model.versions.length > 1 ? "s" : ""} ${model.versions.join(", ")}`];
  if (model.max_batch_size > 0) facts.push(`batches of up to ${model.max_batch_size}${model.batching ? ", made by the server" : ""}`);
  if (model.stream) facts.push("stream of responses");
  if (model.sequence) facts.push("sequences");
  const shown = facts.map((fact) => element("span", {}, fact));
  if (model.ensemble.length) {
    const steps = [...new Set(model.ensemble.map((step) => step.model))].flatMap((name, place) =>
      [place ? ", " : "", element("a", { href: `#${encodeURIComponent(name)}` }, ...breakable(name))]);
    shown.push(element("span", {}, "runs ", ...steps));
  }
  return shown;
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
setInterval(updateLive, LIVE_MS);
refresh();
