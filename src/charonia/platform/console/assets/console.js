// Shared by all pages: the menu of narrow screens, confirmations, and error messages.

const ran = document.querySelector("[data-runs]") !== null;
const sure = document.getElementById("sure");

// Shows a message in the corner; errors stay until the user closes them.
function say(text, isBad = false) {
  const box = document.createElement("div");
  box.className = isBad ? "said bad" : "said";
  const line = document.createElement("p");
  line.textContent = text;
  for (const other of document.querySelectorAll(".said")) if (other.querySelector("p").textContent === text) other.remove();
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "✕";
  close.setAttribute("aria-label", "Close the message");
  close.addEventListener("click", () => box.remove());
  box.append(line, close);
  document.getElementById("said").append(box);
  if (!isBad) setTimeout(() => box.remove(), 5000);
  return box;
}

function problemOf(text, status) {
  try {
    const { error, hint, detail } = JSON.parse(text);
    const message = error ?? (Array.isArray(detail) ? detail.map(({ loc, msg }) => `${loc.at(-1)}: ${msg}`).join("\n") : detail);
    return hint ? `${message}\n${hint}` : message;
  } catch {
    return status ? `The platform answered with status ${status}.` : "The platform cannot be reached.";
  }
}

// ---- questions

function ask(title, text, verb, isDanger) {
  sure.querySelector("h2").textContent = title;
  sure.querySelector("p").textContent = text;
  const yes = sure.querySelector("button[value=yes]");
  yes.textContent = verb;
  yes.classList.toggle("danger", isDanger);
  sure.returnValue = "";
  sure.showModal();
  return new Promise((resolve) => sure.addEventListener("close", () => resolve(sure.returnValue === "yes"), { once: true }));
}

document.addEventListener("htmx:confirm", async (event) => {
  const { elt, question, issueRequest } = event.detail;
  if (!question) return;
  event.preventDefault();
  const verb = elt.dataset.verb ?? elt.textContent.trim();
  if (await ask(elt.dataset.title ?? `${verb}?`, question, verb, elt.classList.contains("danger"))) issueRequest(true);
});

// ---- requests

// Polling pauses while the page is hidden or a question is open, whose button it would replace. Unchanged parts are not
// swapped.
const shown = new Map();
const isPolled = (detail) => detail.elt.matches("[hx-trigger^=every]");

document.addEventListener("htmx:beforeRequest", (event) => {
  if ((document.hidden || sure.open) && isPolled(event.detail)) event.preventDefault();
});

document.addEventListener("htmx:beforeSwap", (event) => {
  const { elt, xhr } = event.detail;
  if (!isPolled(event.detail) || xhr.status !== 200) return;
  heard(elt.id);
  if (sure.open || shown.get(elt.id) === xhr.responseText) event.detail.shouldSwap = false;
  else shown.set(elt.id, xhr.responseText);
});

document.addEventListener("htmx:responseError", (event) => {
  const { elt, xhr } = event.detail;
  const text = problemOf(xhr.responseText, xhr.status);
  const refusal = elt.querySelector?.("[data-refusal]");
  if (refusal && xhr.status !== 401) [refusal.hidden, refusal.firstChild.textContent] = [false, text];
  else if (isPolled(event.detail)) xhr.status === 401 ? location.reload() : growsOld(elt.id, text);
  else say(xhr.status === 401 ? "You are signed out, so nothing was changed. Copy what you have entered, then load the page again to sign in." : text, true);
});

document.addEventListener("htmx:sendError", (event) => {
  if (isPolled(event.detail)) growsOld(event.detail.elt.id, problemOf("", 0));
  else say(problemOf("", 0), true);
});

// Buttons and forms with the address of a call of the API send JSON: `data-body`, and the fields of the form; a field
// that the address names is part of it. Then another page is shown, or a part of this one is read again: `data-then`.
htmx.defineExtension("api", {
  onEvent(name, { detail }) {
    if (name !== "htmx:configRequest") return;
    detail.headers["Content-Type"] = "application/json";
    detail.path = detail.path.replace(/\{(\w+)\}/g, (_, field) => {
      const value = detail.formData.get(field);
      detail.formData.delete(field);
      return encodeURIComponent(value);
    });
  },
  encodeParameters(xhr, sent, form) {
    const numbers = [...form.querySelectorAll("[type=number]")].map(({ name }) => name);
    const fields = [...sent].filter(([, value]) => value !== "");
    return JSON.stringify({ ...JSON.parse(form.dataset.body ?? "{}"), ...Object.fromEntries(fields.map(([name, value]) => [name, numbers.includes(name) ? Number(value) : value])) });
  },
});

document.addEventListener("htmx:afterRequest", async ({ detail: { elt, successful, xhr } }) => {
  const { then, said } = elt.dataset;
  if (!successful) return;
  if (said) say(said);
  if (!then) return;
  const answer = then.includes("{") || elt.matches("form") ? JSON.parse(xhr.responseText || "{}") : {};
  if (!then.startsWith("#")) return location.assign(then.replace(/\{(\w+)\}/g, (_, name) => answer[name]));
  await htmx.ajax("GET", location.pathname + location.search, { target: then, swap: "outerHTML" });
  const made = document.querySelector(`${then} [data-made]`);
  if (!made || !answer.key) return;
  made.hidden = false;
  made.querySelector("strong").textContent = answer.name;
  made.querySelector("code").textContent = made.querySelector("button").dataset.copy = answer.key;
});

// When polling fails, the page says one time from when its data is, until there are answers again.
const unheard = new Set();
let old = null;
let heardAt = new Date();

function growsOld(part, text) {
  unheard.add(part);
  old ??= say(`${text}\nWhat is shown is from ${heardAt.toLocaleTimeString("en-GB")}.`, true);
}

function heard(part) {
  heardAt = new Date();
  unheard.delete(part);
  if (unheard.size) return;
  old?.remove();
  old = null;
}

document.addEventListener("said", (event) => say(event.detail.value));

// ---- the frame

document.addEventListener("click", async (event) => {
  const menu = event.target.closest("[data-menu]");
  if (menu) {
    const isOpen = document.getElementById("side").classList.toggle("open");
    menu.setAttribute("aria-expanded", String(isOpen));
  }
  if (event.target.closest("[data-jump]")) openJump();
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    try {
      await navigator.clipboard.writeText(copy.dataset.copy);
      say("Copied.");
    } catch {
      say(copy.dataset.copy);
    }
  }
});

// ---- Ctrl-K: jump to a page, a model or a deployment

const jump = document.getElementById("jump");

function openJump() {
  jump.showModal();
  htmx.trigger(jump.querySelector("input"), "opened");
}

document.addEventListener("keydown", (event) => {
  if (!jump) return;
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && !sure.open) {
    event.preventDefault();
    jump.open ? jump.close() : openJump();
  } else if (jump.open && ["ArrowDown", "ArrowUp", "Enter"].includes(event.key)) {
    const links = [...jump.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    if (event.key !== "Enter") links.at((at + (event.key === "ArrowDown" ? 1 : at < 0 ? 0 : -1)) % links.length)?.focus();
    else if (at < 0) links[0]?.click();
    else return;
    event.preventDefault();
  }
});

// ---- the form of a deployment: fields with problems are marked, and it is not sent before they are corrected

document.addEventListener("htmx:load", () => {
  const form = document.querySelector("form#form:has(#check)");
  if (!form) return;
  const fields = [...form.querySelectorAll("#check [data-field]")].map((line) => line.dataset.field);
  for (const input of form.querySelectorAll("[name]:not([aria-describedby])")) input.toggleAttribute("aria-invalid", false);
  for (const name of fields) form.elements.namedItem(name)?.setAttribute?.("aria-invalid", "true");
  form.querySelector(".actions .primary").setAttribute("aria-disabled", String(form.querySelector("#check .notice.bad") !== null));
});

document.addEventListener("htmx:confirm", (event) => {
  const { elt } = event.detail;
  if (elt.querySelector?.(".actions [aria-disabled=true]") && !elt.elements?.namedItem("add")?.value) event.preventDefault();
});

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-goes]")) location.assign(event.target.value);
});

document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// ---- logs: the end is in view unless the user has scrolled up

function followEnd(root) {
  for (const tail of root.querySelectorAll?.("pre.tail") ?? []) {
    const key = `tail ${tail.id}`;
    if (shown.get(key) !== false) tail.scrollTop = tail.scrollHeight;
    tail.addEventListener("scroll", () => shown.set(key, tail.scrollHeight - tail.scrollTop - tail.clientHeight < 24));
  }
}
document.addEventListener("htmx:load", (event) => followEnd(event.detail.elt));

// A page that has changed as a whole is loaded again, unless it has text that somebody typed.
const typed = new Set();
document.addEventListener("input", (event) => typed.add(event.target));
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful && event.detail.elt.matches("form")) typed.clear();
});

function renew() {
  if (![...typed].some((input) => input.isConnected && input.closest("main") && input.value)) location.reload();
  else if (!document.querySelector("[data-renew]")) {
    const button = document.createElement("button");
    button.dataset.renew = "";
    button.textContent = "Load the page again";
    button.addEventListener("click", () => location.reload());
    say("This page has changed. Your entries are kept until you load it again.", true).append(button);
  }
}
document.addEventListener("renew", renew);
document.addEventListener("htmx:afterSwap", () => {
  if (!ran && document.querySelector("[data-waits]") && document.querySelector("[data-runs]")) renew();
});

// An open <details> of a form stays open when the form is replaced.
document.addEventListener("toggle", (event) => {
  if (event.target.id) shown.set(`open ${event.target.id}`, event.target.open);
}, true);
document.addEventListener("htmx:afterSwap", () => {
  for (const details of document.querySelectorAll("details[id]"))
    if (shown.has(`open ${details.id}`)) details.open = shown.get(`open ${details.id}`);
});
