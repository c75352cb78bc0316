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
  if (isPolled(event.detail)) xhr.status === 401 ? location.reload() : growsOld(elt.id, text);
  else say(xhr.status === 401 ? "You are signed out, so nothing was changed. Copy what you have entered, then load the page again to sign in." : text, true);
});

document.addEventListener("htmx:sendError", (event) => {
  if (isPolled(event.detail)) growsOld(event.detail.elt.id, problemOf("", 0));
  else say(problemOf("", 0), true);
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

// Reloads the page when the deployment starts to run.
document.addEventListener("htmx:afterSwap", () => {
  if (!ran && document.querySelector("[data-waits]") && document.querySelector("[data-runs]")) location.reload();
});

// An open <details> of a form stays open when the form is replaced.
document.addEventListener("toggle", (event) => {
  if (event.target.id) shown.set(`open ${event.target.id}`, event.target.open);
}, true);
document.addEventListener("htmx:afterSwap", () => {
  for (const details of document.querySelectorAll("details[id]"))
    if (shown.has(`open ${details.id}`)) details.open = shown.get(`open ${details.id}`);
});
