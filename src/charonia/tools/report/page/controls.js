// What pages have in common: their data, colours, buttons, legends, stacked bars.

const data = JSON.parse(document.getElementById("data").textContent);
const LINES = ["var(--s0)", "var(--s1)", "var(--s2)", "var(--s3)", "var(--s4)", "var(--s5)"];

function color(place) {
  return LINES[place % LINES.length];
}

function section(identity, ...content) {
  const found = document.getElementById(identity);
  found.querySelectorAll(".body").forEach((old) => old.remove());
  found.append(element("div", { class: "body" }, ...content));
  found.hidden = false;
}

function toggle(text, pressed, change, key = null) {
  const button = element("button", { type: "button", "aria-pressed": pressed });
  if (key) {
    const sample = element("span", { class: "key", "aria-hidden": "true" });
    sample.style.borderColor = key;
    button.append(sample);
  }
  button.append(text);
  button.addEventListener("click", () => change(button));
  return button;
}

// Buttons of which one is pressed.
function choice(label, texts, chosen, change) {
  const group = element("fieldset", { class: "choices", "aria-label": label });
  const buttons = texts.map((text, place) =>
    toggle(text, place === chosen, () => {
      buttons.forEach((button, other) => button.setAttribute("aria-pressed", other === place));
      change(place);
    }));
  group.append(...buttons);
  return group;
}

function captioned(text, group) {
  return element("div", { class: "captioned" }, element("span", { class: "caption" }, text), group);
}

function legend(entries, kind = "") {
  const list = element("div", { class: "legend" });
  for (const [name, shade, dashed] of entries) {
    const key = element("span", { class: `key ${kind} ${dashed ? "dashed" : ""}` });
    key.style.borderColor = shade;
    if (kind) key.style.background = shade;
    list.append(element("span", {}, key, name));
  }
  return list;
}

function percentName(percent) {
  return `p${percent}`;
}

function axisChoice(kind, change) {
  return choice("Latency axis", ["Linear", "Log"], kind === "log" ? 1 : 0, (place) => change(place ? "log" : "linear"));
}

// ---- where the time goes

// The parts of a request's time that some row has.
function usedParts(rows) {
  return data.parts.filter(([key]) => rows.some(([, part]) => part[key] > 0));
}

function stacks(rows, used) {
  const total = (part) => used.reduce((sum, [key]) => sum + (part[key] || 0), 0);
  const most = Math.max(...rows.map(([, part]) => total(part)), 1);
  const list = element("div", { class: "stacks" });
  for (const [label, part] of rows) {
    const texts = used.map(([key, text]) => [text, durationText(part[key] || 0), key]);
    const spoken = `${label}: ${texts.map(([text, value]) => `${text} ${value}`).join(", ")}`;
    const stack = element("div", { class: "stack" });
    for (const [key] of used) {
      const piece = element("i");
      piece.style.width = `${(100 * (part[key] || 0)) / most}%`;
      piece.style.background = `var(--p-${key})`;
      stack.append(piece);
    }
    const row = element("div", { tabindex: 0, role: "img", "aria-label": spoken },
      element("span", { class: "name" }, label), stack, element("span", { class: "total" }, durationText(total(part))));
    row.style.position = "relative";
    const open = () => {
      const tip = element("div", { class: "tip" }, element("b", {}, label));
      for (const [text, value, key] of texts) {
        const sample = element("span", { class: "key square" });
        sample.style.background = `var(--p-${key})`;
        tip.append(element("div", {}, sample, element("span", {}, text), element("span", {}, value)));
      }
      tip.style.top = "100%";
      tip.style.left = `${stack.offsetLeft}px`;
      row.append(tip);
    };
    const close = () => row.querySelectorAll(".tip").forEach((tip) => tip.remove());
    for (const event of ["pointerenter", "focus"]) row.addEventListener(event, () => { close(); open(); });
    for (const event of ["pointerleave", "blur"]) row.addEventListener(event, close);
    list.append(row);
  }
  return list;
}
