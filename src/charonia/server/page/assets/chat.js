// Conversations with language models, over OpenAI's API: one, or two side by side. They stay in this tab, with the view of their model.

const CHAT_ROUTE = "chat/completions";
const AT_END_PX = 40;

// Calls `take` with each chunk of an answer as it comes.
async function chatStream(request, signal, take) {
  const response = await ask(`v1/${CHAT_ROUTE}`, {
    method: "POST", body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    headers: { "Content-Type": "application/json" }, signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;  // a comment that keeps the connection open
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(0, chunk.error.message);
      take(chunk);
    }
  }
}

// How long an answer took: its tokens where the server tells them, their speed, the time to the first.
function speedText({ usage, begun, first, last }) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(plural(tokens, "token"));
  if (tokens > 1 && last > first) parts.push(`${((tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${durationText(first - begun)}`);
  return parts.join(" · ");
}

// Name, range and step of what a request may set, empty for the model's own.
const CHAT_NUMBERS = [["temperature", "Temperature", 0, 2, 0.1], ["max_tokens", "Longest answer, in tokens", 1, null, 1]];

// A request as code, for clients of OpenAI's API.
function chatSamples(request) {
  const base = new URL("v1", document.baseURI).href;
  const key = sessionStorage.getItem(KEY) ? "YOUR_KEY" : "unused";
  const json = JSON.stringify(request, null, 2);
  const members = Object.entries(request).map(([name, value]) => `    ${name}=${pythonText(value)},\n`).join("");
  const header = key === "unused" ? "" : ` -H 'Authorization: Bearer ${key}'`;
  return [
    ["Python", `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${key}")\nanswer = client.chat.completions.create(\n${members})\nprint(answer.choices[0].message.content)`],
    ["curl", `curl ${base}/${CHAT_ROUTE}${header} -H 'Content-Type: application/json' -d '${json.replaceAll("'", "'\\''")}'`],
    ["JavaScript", `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${base}", apiKey: "${key}" });\nconst answer = await client.chat.completions.create(${json});\nconsole.log(answer.choices[0].message.content);`],
  ];
}

function pythonText(value) {
  return typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);  // texts, numbers and lists of messages
}

// A conversation with one model. `changed` is called when an answer begins and ends.
function conversation(name, settings, changed) {
  let messages = [];
  let abort = null;
  const empty = element("p", { class: "empty" }, "Say something; the answer appears word by word.");
  const log = element("div", { class: "log", role: "log", tabindex: 0, "aria-label": `Conversation with ${name}` }, empty);
  const retry = element("button", { type: "button", class: "copy", click: () => again() }, "Try again");

  const show = (kind, label, ...content) => {
    empty.remove();
    const body = element("div", { class: "said" }, ...content);
    const message = element("div", { class: `message ${kind}` }, element("span", { class: "who" }, label), body);
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return { message, body };
  };
  const request = () => ({ model: name, messages: settings.system() ? [{ role: "system", content: settings.system() }, ...messages] : messages, ...settings.numbers() });
  const answer = async () => {
    const timing = { begun: performance.now(), first: 0, last: 0, usage: null };
    const asked = messages;
    const { message, body } = show("theirs", name);
    let text = "";
    let drawn = 0;
    const draw = () => {
      drawn = 0;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < AT_END_PX;
      body.replaceChildren(...markdown(text));
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    body.classList.add("growing");
    abort = new AbortController();
    retry.remove();
    changed();
    let problem = null;
    try {
      await chatStream(request(), abort.signal, (chunk) => {
        timing.usage = chunk.usage ?? timing.usage;
        const piece = chunk.choices[0]?.delta?.content;
        if (!piece) return;
        timing.last = performance.now();
        timing.first ||= timing.last;
        text += piece;
        drawn ||= requestAnimationFrame(draw);
      });
    } catch (error) {
      problem = error;
    }
    cancelAnimationFrame(drawn);
    draw();
    const isStopped = abort.signal.aborted;
    abort = null;
    body.classList.remove("growing");
    if (text) asked.push({ role: "assistant", content: text });
    else if (problem) asked.pop();  // as if it had not been said
    const note = problem && !isStopped ? element("p", { class: "problem", role: "alert" }, problem.message)
      : element("p", { class: "note" }, isStopped ? "Stopped" : speedText(timing));
    if (text && asked === messages) note.append(" ", retry);
    message.append(note);
    log.scrollTop = log.scrollHeight;
    changed();
  };
  const again = () => {
    messages.pop();
    log.lastElementChild.remove();
    answer();
  };
  return {
    name, log, request,
    isAnswering: () => abort !== null,
    isEmpty: () => !log.querySelector(".message"),
    stop: () => abort?.abort(),
    say(text) {
      messages.push({ role: "user", content: text });
      show("mine", "You", text);
      answer();
    },
    reset() {
      abort?.abort();
      messages = [];
      log.replaceChildren(empty);
    },
  };
}

function chatSection(model, others) {
  const text = element("textarea", { rows: 1, "aria-label": "Message", placeholder: "Message", input: () => grow() });
  const send = element("button", { type: "submit", class: "primary" }, "Send");
  const stop = element("button", { type: "button", hidden: true, click: () => lanes.forEach((lane) => lane.stop()) }, "Stop");
  const system = element("textarea", { rows: 2, "aria-label": "System message", placeholder: "You answer in one sentence.", input: () => changed() });
  const numbers = CHAT_NUMBERS.map(([name, label, min, max, step]) =>
    [name, label, element("input", { type: "number", min, max, step, placeholder: "the model's", "aria-label": label, input: () => changed() })]);
  const settings = {
    system: () => system.value.trim(),
    numbers: () => Object.fromEntries(numbers.filter(([, , input]) => input.value !== "").map(([name, , input]) => [name, Number(input.value)])),
  };
  const grow = () => {
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  };
  const logs = element("div", { class: "lanes" });
  const code = element("details", {}, element("summary", {}, "The same conversation as code"));
  let sample = 0;
  const drawCode = () => {
    const samples = chatSamples(lanes[0].request());
    const source = element("pre", { tabindex: 0 }, samples[sample][1]);
    code.replaceChildren(code.firstChild, element("div", { class: "code" }, element("div", { class: "codebar" },
      choice("Language", samples.map(([label]) => label), sample, (place) => { sample = place; source.textContent = samples[place][1]; }),
      copyButton(() => source.textContent)), source));
  };
  code.addEventListener("toggle", () => { if (code.open) drawCode(); });
  const changed = () => {
    const isAnswering = lanes.some((lane) => lane.isAnswering());
    send.hidden = isAnswering;
    stop.hidden = !isAnswering;
    reset.hidden = lanes.every((lane) => lane.isEmpty());
    if (code.open) drawCode();
  };
  const begin = (...names) => {
    lanes.forEach((lane) => lane.reset());
    lanes = names.map((name) => conversation(name, settings, changed));
    logs.replaceChildren(...lanes.map((lane) => element("div", {}, ...(lanes.length > 1 ? [element("h3", {}, lane.name)] : []), lane.log)));
    changed();
  };
  const reset = element("button", { type: "button", hidden: true, click: () => {
    lanes.forEach((lane) => lane.reset());
    changed();
    text.focus();
  } }, "New conversation");
  const compare = element("select", { "aria-label": "Compare with", change: () => begin(...[model.name, compare.value].filter(Boolean)) },
    element("option", { value: "" }, "Compare with …"), ...others.map((name) => element("option", { value: name }, name)));
  const form = element("form", { class: "composer", autocomplete: "off" }, text, send, stop);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const said = text.value.trim();
    if (!said || send.hidden) return;
    text.value = "";
    grow();
    lanes.forEach((lane) => lane.say(said));
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  let lanes = [];
  begin(model.name);
  const options = element("details", {}, element("summary", {}, "Settings"),
    element("label", { class: "field" }, "System message ", system),
    element("div", { class: "numbers" }, ...numbers.map(([, label, input]) => element("label", {}, label, " ", input))));
  return element("section", { class: "chat" },
    element("div", { class: "headline" }, element("h2", {}, "Chat"), element("div", { class: "controls" }, reset, ...(others.length ? [compare] : []))),
    logs, form, options, code);
}
