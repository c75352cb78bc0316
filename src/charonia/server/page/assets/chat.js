// A conversation with a language model, over OpenAI's API. It stays in this tab, with the view of its model.

const CHAT_ROUTE = "chat/completions";

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
      const data = event.replace(/^data: /, "");
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

function chatSection(model) {
  let messages = [];
  let abort = null;
  const empty = element("p", { class: "empty" }, "Say something; the answer appears word by word.");
  const log = element("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Conversation" }, empty);
  const text = element("textarea", { rows: 1, "aria-label": "Message", placeholder: "Message", input: () => grow() });
  const send = element("button", { type: "submit", class: "primary" }, "Send");
  const stop = element("button", { type: "button", hidden: true, click: () => abort.abort() }, "Stop");
  const system = element("textarea", { rows: 2, "aria-label": "System message", placeholder: "You answer in one sentence." });
  const numbers = CHAT_NUMBERS.map(([name, label, min, max, step]) =>
    [name, label, element("input", { type: "number", min, max, step, placeholder: "the model's", "aria-label": label })]);
  const grow = () => {
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  };
  const reset = element("button", { type: "button", hidden: true, click: () => {
    abort?.abort();
    messages = [];
    log.replaceChildren(empty);
    reset.hidden = true;
    text.focus();
  } }, "New conversation");

  const say = (kind, label, content) => {
    empty.remove();
    const body = element("div", { class: "said" }, content);
    const message = element("div", { class: `message ${kind}` }, element("span", { class: "who" }, label), body);
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return { message, body };
  };
  const request = () => {
    const given = { model: model.name, messages: system.value.trim() ? [{ role: "system", content: system.value.trim() }, ...messages] : messages };
    for (const [name, , input] of numbers) if (input.value !== "") given[name] = Number(input.value);
    return given;
  };
  const answer = async () => {
    const timing = { begun: performance.now(), first: 0, last: 0, usage: null };
    const conversation = messages;
    const { message, body } = say("theirs", model.name, "");
    body.classList.add("growing");
    abort = new AbortController();
    send.hidden = true;
    stop.hidden = reset.hidden = false;
    let problem = null;
    try {
      await chatStream(request(), abort.signal, (chunk) => {
        timing.usage = chunk.usage ?? timing.usage;
        const piece = chunk.choices[0]?.delta?.content;
        if (!piece) return;
        timing.last = performance.now();
        timing.first ||= timing.last;
        const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        body.append(piece);
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      });
    } catch (error) {
      problem = error;
    }
    const isStopped = abort.signal.aborted;
    body.classList.remove("growing");
    body.normalize();
    if (body.textContent) conversation.push({ role: "assistant", content: body.textContent });
    else if (problem) conversation.pop();  // as if it had not been said
    if (problem && !isStopped) message.append(element("p", { class: "problem", role: "alert" }, problem.message));
    else message.append(element("p", { class: "note" }, isStopped ? "Stopped" : speedText(timing)));
    log.scrollTop = log.scrollHeight;
    send.hidden = false;
    stop.hidden = true;
  };
  const form = element("form", { class: "composer", autocomplete: "off" }, text, send, stop);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const said = text.value.trim();
    if (!said || send.hidden) return;
    text.value = "";
    grow();
    messages.push({ role: "user", content: said });
    say("mine", "You", said);
    answer();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  const settings = element("details", {}, element("summary", {}, "Settings"),
    element("label", { class: "field" }, "System message ", system),
    element("div", { class: "numbers" }, ...numbers.map(([, label, input]) => element("label", {}, label, " ", input))));
  return element("section", { class: "chat" },
    element("div", { class: "headline" }, element("h2", {}, "Chat"), reset), log, form, settings);
}
