// The slider and the weights of two versions follow each other.

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
