// The batch: a bar a request; yours says "you", brought visitors say so, nobody else has a name.

import { Figure } from "./figure.js";
import { onLive, wake, you } from "./live.js";
import { count, parts, say } from "./words.js";

const MOST_NAMED_LANES = 12;
const SHORTEST_NAMED_S = 3;

export function mount({ element }) {
  const part = parts(element);
  const figure = new Figure(part.figure);
  const brought = new Set();
  document.addEventListener("click", ({ target }) => target.closest("#visitors") && wake());
  onLive((live) => {
    live.brought.forEach((client) => brought.add(client));
    const { running, waiting, most, tokens_per_second: speed } = live;
    say(part.caption, `${count(running)} of ${count(most)} rows · ${count(waiting)} waiting · ${count(speed)} tokens/s`);
    const { data, layout } = live.figures.batch;
    const anybody = data.some((trace) => trace.y.length);
    figure.update(anybody ? { data, layout: { ...layout, annotations: names(data, layout, brought) } } : null);
  });
}

/** A name at the start of each bar that has one, while the bars are thick enough to read it. */
function names(data, layout, brought) {
  if (layout.yaxis.range[0] > MOST_NAMED_LANES) return [];
  const bars = data.find((trace) => trace.name === "decode");
  return bars.y.flatMap((lane, bar) => {
    const [client] = bars.customdata[bar];
    const yours = client === you.client;
    const text = yours ? "you" : brought.has(client) ? "brought" : "";
    if (!text || bars.x[bar] < SHORTEST_NAMED_S) return [];
    return { text, x: bars.base[bar], y: lane, xanchor: "left", xshift: 4, showarrow: false,
      font: { color: yours ? "var(--on-you)" : "var(--on-bar)", size: 12 } };
  });
}
