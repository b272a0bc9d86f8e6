// Cache growth: who holds how many bytes, and where the bytes come from.

import { Figure } from "./figure.js";
import { sayTerms } from "./glossary.js";
import { onLive, you } from "./live.js";
import { WhatIf } from "./whatif.js";
import { count, megabytes, parts, say } from "./words.js";

export function mount({ element }) {
  const part = parts(element);
  const figure = new Figure(part.figure);
  const whatIf = new WhatIf(part);
  onLive((live) => {
    const { model, slots, kept_bytes: kept, public_bytes: shared, reserved_bytes: reserved } = live;
    if (!model) return;
    const total = slots.reduce((sum, slot) => sum + slot.tokens, 0);
    const mine = slots.filter(({ client }) => client !== null && client === you.client);
    const yours = mine.reduce((sum, slot) => sum + slot.tokens, 0);
    const size = model.bytes_per_token;
    const held = [yours && [yours * size, "yours"], [total * size, "in use"], kept + shared && [kept + shared, "kept"], [reserved, "reserved"]];
    say(part.caption, `${held.filter(Boolean).map(([bytes, name]) => `${megabytes(bytes).slice(0, -3)} ${name}`).join(" · ")}, in MB`);
    part.formula.replaceChildren(...formula(model, yours || total, yours ? "your" : "the batch's"));
    figure.update(live.figures.cache);
    sayTerms(part.split, split(live, total * size));
    sayTerms(part.shared, saved(live, mine));
    whatIf.take(model, live.reserved_tokens, reserved);
  });
}

/** The same bytes cut otherwise: by layer, by kind; what nobody's tokens fill. */
function split({ model, padding_bytes: padding }, used) {
  if (!used) return "Nobody's tokens are in use at the moment.";
  const said = [`Each of ${model.layers} layers holds ${kilobytes(used / model.layers)}, ${kinds(model)}`];
  if (padding) said.push(`each step reads ${kilobytes(padding)} of padding, since all rows are read to one round length`);
  return `${said.join("; ")}.`;
}

/** What nobody had to read again: a client's own earlier turns, and beginnings that are the same for everybody. */
function saved({ reused_tokens: reused, public_tokens: open }, yours) {
  const sum = (name) => yours.reduce((total, slot) => total + slot[name], 0);
  const [own, shared] = [sum("reused_tokens") - sum("public_tokens"), sum("public_tokens")];
  const taken = [own && `${count(own)} from an earlier turn`, shared && `${count(shared)} from a public beginning`].filter(Boolean);
  if (taken.length) return `Of your ${count(sum("tokens"))} tokens, ${taken.join(" and ")} did not have to be read again.`;
  const part = { 0: "none", [reused]: "all" }[open] ?? count(open);
  if (!reused) return "No prefix reuse so far: nobody's text has begun like one that was read before.";
  return `Prefix reuse has saved all visitors together ${count(reused)} tokens, ${part} of them public.`;
}

const kilobytes = (bytes) => (bytes < 1e6 ? `${count(bytes / 1e3)} kB` : megabytes(bytes));

function kinds({ head_dim: keys, value_dim: values }) {
  return keys === values ? "half keys, half values" : `keys to values as ${keys} to ${values}`;
}

function formula({ layers, kv_heads, head_dim, bytes_per_value, bytes_per_token }, tokens, whose) {
  const bold = (text) => Object.assign(document.createElement("b"), { textContent: text });
  const product = `2 × ${layers} layers × ${kv_heads} heads × ${head_dim} × ${bytes_per_value} bytes = `;
  const line = [product, bold(`${count(bytes_per_token)} bytes a token`)];
  if (tokens) line.push(` × ${whose} ${count(tokens)} tokens = `, bold(megabytes(tokens * bytes_per_token)));
  return line;
}
