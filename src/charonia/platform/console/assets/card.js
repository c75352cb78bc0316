// The card of a model: the Markdown of its README.

const card = document.querySelector("[data-markdown]");
card.replaceChildren(...markdown(card.textContent));
