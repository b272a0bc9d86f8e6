// The words of the trade, explained where they stand: a term in a sentence is a button with a small note.

const TERMS = {
  "keys and values": "What each layer computed for a token and needs again for every later one. Keeping them is the cache.",
  cache: "Keys and values of the text so far, kept so that a step need not compute them again.",
  layers: "The model's floors: each one has keys and values of its own for every token.",
  batch: "Several requests computed in one step. The weights are read once for all of them, which is most of the work.",
  "step": "One pass through the model: a new token for every request in the batch.",
  tokens: "The pieces of text a model reads and writes, here some four letters each.",
  token: "A piece of text that a model reads or writes, here some four letters.",
  padding: "Places that a step reads though nobody's text is there, since all rows are read to the same length.",
  "prefix reuse": "Going on from keys and values that are there already, where a text begins like one that was read before.",
  "public beginning": "A text that the page itself brings, such as its system prompt. It is read once, and copied for whoever begins with it.",
  prompt: "The text that is there before the model writes. It is read in large pieces: the prefill.",
  logits: "A number for every word of the vocabulary: how likely it comes next.",
  "KV heads": "How many sets of keys and values a layer keeps. Fewer than query heads: a smaller cache.",
  "warm-up": "What only the first call pays: kernels chosen, memory taken, caches filled.",
};
const PATTERN = new RegExp(`\\b(${Object.keys(TERMS).sort((a, b) => b.length - a.length).join("|")})\\b`, "g");

let note = null;

/** Set the text of `node`, each known term once as a button that explains it. */
export function sayTerms(node, text) {
  if (node.dataset.said === text) return;
  node.dataset.said = text;
  const seen = new Set();
  const pieces = [];
  let end = 0;
  for (const { 0: term, index } of text.matchAll(PATTERN)) {
    if (seen.has(term)) continue;
    seen.add(term);
    pieces.push(text.slice(end, index), button(term));
    end = index + term.length;
  }
  node.replaceChildren(...pieces, text.slice(end));
}

function button(term) {
  const node = document.createElement("button");
  Object.assign(node, { type: "button", className: "term", textContent: term });
  for (const event of ["mouseenter", "focus", "click"]) node.addEventListener(event, () => explain(node, term));
  for (const event of ["mouseleave", "blur"]) node.addEventListener(event, hide);
  node.addEventListener("keydown", ({ key }) => key === "Escape" && hide());
  return node;
}

function explain(node, term) {
  note ??= Object.assign(document.createElement("div"), { id: "glossary", className: "glossary" });
  note.setAttribute("role", "tooltip");
  document.querySelector(".gradio-container").append(note);
  note.textContent = TERMS[term];
  note.hidden = false;
  node.setAttribute("aria-describedby", note.id);
  const at = node.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, innerWidth - note.offsetWidth - 8));
  const above = at.top - note.offsetHeight - 6;
  note.style.left = `${left}px`;
  note.style.top = `${above > 8 ? above : at.bottom + 6}px`;
}

function hide() {
  if (note) note.hidden = true;
}
