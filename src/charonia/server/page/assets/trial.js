// The form to try a model, what it answered, and the same request as code.

const EDITED_MS = 250;

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
  changed();  // the code shows the values of the form from the beginning
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
  const latestFirst = [...model.versions].reverse();
  const select = element("select", { "aria-label": "Version", change: changed },
    element("option", { value: "" }, `latest (${latestFirst[0]})`), ...latestFirst.slice(1).map((number) => element("option", { value: number }, number)));
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
  let chosen = samples[0]?.label, drawn;
  const tabs = element("div");
  const source = element("pre", { tabindex: 0 });
  const draw = () => {
    if (!samples.some((sample) => sample.label === chosen)) chosen = samples[0]?.label;
    const place = samples.findIndex((sample) => sample.label === chosen);
    const labels = samples.map((sample) => sample.label);
    if (String(labels) !== drawn) {  // otherwise a button would be replaced under a click
      drawn = String(labels);
      tabs.replaceChildren(choice("Language", labels, place, (pressed) => {
        chosen = samples[pressed].label;
        source.textContent = samples[pressed].source;
      }));
    }
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
