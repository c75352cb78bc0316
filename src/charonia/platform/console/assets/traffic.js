// The slider and the weights of two versions follow each other; the effect of a canary is shown before it starts.

document.addEventListener("input", (event) => {
  const form = event.target.closest("[data-split]");
  if (!form) return;
  const slider = form.querySelector("#slider");
  const [first, second] = form.querySelectorAll("input[name^=weight-]");
  if (!slider) return;
  if (event.target === slider) {
    second.value = slider.value;
    first.value = 100 - slider.value;
  } else if (event.target === first || event.target === second) {
    const all = Number(first.value) + Number(second.value);
    slider.value = all ? (100 * Number(second.value)) / all : 0;
  }
  form.querySelector("#slider-text").textContent = `${slider.value} %`;
});

// A canary that takes requests from its version asks first.
function preview() {
  const form = document.querySelector("[data-canary]");
  if (!form) return;
  const version = form.querySelector("[name=version]").value;
  const now = JSON.parse(document.getElementById("versions").dataset.shares)[version] ?? 0;
  const first = Number.parseFloat(form.querySelector("[name=steps]").value);
  const text = first >= 0 ? `Version ${version} gets ${first} % of the requests in place of ${now} %.` : "";
  form.querySelector("[data-effect]").textContent = text;
  if (text && now > first) form.setAttribute("hx-confirm", text);
  else form.removeAttribute("hx-confirm");
}
document.addEventListener("input", preview);
document.addEventListener("htmx:afterSwap", () => {
  preview();
  const [versions, controls] = ["versions", "controls"].map((id) => document.getElementById(id));
  if (versions && controls?.dataset.open && versions.dataset.open !== controls.dataset.open)  // a plan began or ended elsewhere
    htmx.ajax("GET", location.href, { source: controls, target: "#controls", swap: "outerHTML" });
});
preview();
