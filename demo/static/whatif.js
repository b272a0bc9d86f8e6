// What the cache would cost elsewhere: the formula for another model, beside what is measured here.

import { Figure } from "./figure.js";
import { CARDS, SHAPES, cacheBytes } from "./shapes.js";
import { count, plural, say } from "./words.js";

const LEAST_TOKENS = 64, LEAST_BYTES = 1e6, MOST_POINTS = 40, NARROW_PX = 480;
const DTYPES = { 4: "float32", 2: "half precision", 1: "8 bit" };

export class WhatIf {
  constructor(part) {
    this.part = part;
    this.figure = new Figure(part["whatif-figure"]);
    this.measured = new Map(); // bytes of the real tensors, by the tokens they have room for
    part.shape.replaceChildren(...SHAPES.map(({ name }, index) => new Option(name, index)));
    part.shape.value = SHAPES.findIndex(({ name }) => name === "Llama 3.1 8B");
    for (const field of ["shape", "tokens", "rows", "dtype"]) part[field].addEventListener("input", () => this.show());
    part.whatif.addEventListener("toggle", () => this.show());
  }

  /** Take in what is reserved here now: `bytes` of tensors, with room for `tokens`. */
  take(model, tokens, bytes) {
    this.model = model;
    if (tokens && !this.measured.has(tokens)) {
      this.measured.set(tokens, bytes);
      if (this.measured.size > MOST_POINTS) this.measured.delete(this.measured.keys().next().value);
      this.show();
    }
  }

  show() {
    const { part } = this;
    if (!part.whatif.open || !this.model) return;
    const shape = SHAPES[part.shape.value];
    const tokens = whole(part.tokens), rows = whole(part.rows), bytes = Number(part.dtype.value);
    const total = cacheBytes(shape, tokens, rows, bytes);
    say(part["whatif-formula"], formula(shape, tokens, rows, bytes, total));
    say(part["whatif-said"], sentence(shape, tokens, rows, bytes, total));
    this.figure.update(this.draw(shape, tokens, rows, bytes, total));
  }

  draw(shape, tokens, rows, bytes, total) {
    const most = Math.max(262144, 2 * tokens * rows);
    const places = Array.from({ length: 60 }, (_, n) => LEAST_TOKENS * (most / LEAST_TOKENS) ** (n / 59));
    const here = { ...this.model, sliding: 0 };
    const ours = places.map((x) => cacheBytes(here, x, 1, this.model.bytes_per_value));
    const theirs = places.map((x) => cacheBytes(shape, x / rows, rows, bytes));
    const top = Math.max(3e11, 2 * total);
    const points = [...this.measured];
    const narrow = this.figure.node.clientWidth < NARROW_PX; // no room for names beside the model's own
    const line = (y, color, dash) => ({ type: "scatter", mode: "lines", x: places, y, line: { color, width: 2, dash }, hoverinfo: "skip" });
    return {
      data: [
        line(theirs, "var(--ink)", "solid"),
        line(ours, "var(--cached)", "4px,4px"),
        { type: "scatter", mode: "markers", x: points.map(([x]) => x), y: points.map(([, y]) => y),
          marker: { color: "var(--cached)", size: 8 }, hovertemplate: "measured: %{y:.3s}B for %{x} tokens<extra></extra>" },
        { type: "scatter", mode: "markers", x: [tokens * rows], y: [total],
          marker: { color: "var(--ink)", size: 10, symbol: "diamond" }, hovertemplate: `${gigabytes(total)}<extra></extra>` },
      ],
      layout: {
        height: 248, margin: { l: 52, r: 16, t: 24, b: 28 }, showlegend: false,
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: "var(--muted)", size: 12 },
        xaxis: axis([LEAST_TOKENS, most], [100, 1e3, 1e4, 1e5, 1e6, 1e7], ["100", "1,000", "10,000", "100,000", "1 million", "10 million"]),
        yaxis: axis([LEAST_BYTES, top], [1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12], ["1 MB", "10 MB", "100 MB", "1 GB", "10 GB", "100 GB", "1 TB"]),
        shapes: CARDS.map(({ bytes: y }) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: "var(--line)", width: 1, dash: "dot" } })),
        annotations: [
          text("bytes, by tokens of all sequences together", { xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yshift: 4 }),
          ...CARDS.map(({ name, bytes: y }, index) => text(narrow ? name.replace(/ \(.*/, "") : name, { xref: "paper", x: 0, y: Math.log10(y), xanchor: "left", xshift: index % 2 ? (narrow ? 60 : 124) : 4, yshift: -2 })),
          text(shape.name, { x: Math.log10(tokens * rows), y: Math.log10(total), xanchor: "right", xshift: -8, font: { color: "var(--ink)", size: 12 } }),
          text("dashed: this engine · dots: measured here", { xref: "paper", yref: "paper", x: 1, y: 0, xanchor: "right", yshift: 2, font: { color: "var(--cached)", size: 12 } }),
        ],
      },
    };
  }
}

const whole = (field) => Math.min(Math.max(Math.round(Number(field.value)) || 1, 1), Number(field.max));
const gigabytes = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(bytes >= 1e11 ? 0 : 1)}\u00a0GB` : `${(bytes / 1e6).toFixed(1)}\u00a0MB`);
const text = (words, where) => ({ text: words, showarrow: false, yanchor: "bottom", font: { color: "var(--muted)", size: 12 }, ...where });
const axis = (range, tickvals, ticktext) => ({ type: "log", range: range.map(Math.log10), tickvals, ticktext, gridcolor: "var(--line)",
  showgrid: false, zeroline: false, tickfont: { color: "var(--muted)", size: 12 }, fixedrange: true });

function formula({ layers, kv_heads, head_dim, sliding = 0, window }, tokens, rows, bytes, total) {
  const whose = `2 × ${plural(kv_heads, "head")} × ${head_dim} × ${bytes} bytes`;
  const held = sliding && tokens > window
    ? `(${layers - sliding} layers × ${count(tokens)} + ${sliding} layers × ${count(window)} tokens)`
    : `${layers} layers × ${count(tokens)} tokens`;
  return `${whose} × ${held} × ${plural(rows, "sequence")} = ${gigabytes(total)}`;
}

function sentence({ heads, kv_heads, layers, sliding = 0, window }, tokens, rows, bytes, total) {
  const fits = CARDS.find((card) => card.bytes > total);
  const room = fits ? `leaves ${gigabytes(fits.bytes - total)} of ${fits.name} for the weights` : "is more than any of these cards holds";
  const grouped = heads > kv_heads ? ` ${kv_heads === 1 ? "One KV head serves" : `${kv_heads} KV heads serve`} ${heads} query heads: multi-head attention would hold ${(heads / kv_heads).toFixed(0)} times as much.` : " Every query head has its own keys and values: grouped-query attention would hold less.";
  const slides = sliding ? ` ${sliding} of ${layers} layers look back ${count(window)} tokens only, and hold no more.` : "";
  return `In ${DTYPES[bytes]}, that ${room}.${grouped}${slides}`;
}
