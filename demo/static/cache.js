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
    const { model, slots, kept_bytes: kept, reserved_bytes: reserved } = live;
    if (!model) return;
    const total = slots.reduce((sum, slot) => sum + slot.tokens, 0);
    const yours = slots.filter((slot) => slot.client === you.client).reduce((sum, slot) => sum + slot.tokens, 0);
    const size = model.bytes_per_token;
    const caption = [yours && `${megabytes(yours * size)} yours`, `${megabytes(total * size)} in use`,
      kept && `${megabytes(kept)} kept`, `${megabytes(reserved)} reserved`];
    say(part.caption, caption.filter(Boolean).join(" · "));
    part.formula.replaceChildren(...formula(model, yours || total, yours ? "your" : "the batch's"));
    figure.update(live.figures.cache);
    sayTerms(part.split, split(live, total * size));
    whatIf.take(model, live.reserved_tokens, reserved);
  });
}

/** The same bytes cut otherwise: by layer, by kind; what nobody's tokens fill; what was saved. */
function split({ model, padding_bytes: padding, reused_tokens: reused }, used) {
  const said = used ? [`Each of ${model.layers} layers holds ${kilobytes(used / model.layers)}, ${kinds(model)}`] : [];
  if (padding) said.push(`each step reads ${kilobytes(padding)} of padding, where rows are shorter than the longest`);
  if (reused) said.push(`beginnings that were kept saved reading ${count(reused)} tokens so far`);
  return said.length ? `${said.join("; ")}.` : "";
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
