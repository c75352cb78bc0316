// The form of the server's page, for the models of one deployment. Requests go through the platform.

const place = document.getElementById("trial");

const ACCESS = {
  base: place?.dataset.server,
  credentials: "same-origin",
  headers: () => ({ "X-CSRF-Token": document.querySelector('meta[name="csrf-token"]').content }),
};

async function begin() {
  let models;
  try {
    models = (await askJson("openapi.json"))["x-models"];
  } catch (error) {
    place.replaceChildren(element("section", { role: "alert" }, element("h2", {}, "The deployment does not answer"), element("p", { class: "about" }, error.message)));
    return;
  }
  if (!models.length) {
    place.replaceChildren(element("section", {}, element("p", { class: "empty" }, "No model is ready yet.")));
    return;
  }
  if (place.dataset.code === "only") {
    place.replaceChildren(...codeSection(models[0]).element.childNodes);
    place.classList.add("code");
    place.querySelector("h2").remove();
    return;
  }
  const body = element("div");
  const show = (at) => body.replaceChildren(element("h2", { class: "hidden" }, "Signature"), signatureSection(models[at]), ...trySections(models[at]).slice(0, place.dataset.code === "none" ? 1 : undefined));
  const first = Math.max(0, models.findIndex(({ name }) => name === place.dataset.model));
  const picks = models.length > 1 ? [element("div", { class: "filters" }, choice("Model", models.map(({ name }) => name), first, show))] : [];
  place.replaceChildren(...picks, body);
  show(first);
}

if (place) begin();
