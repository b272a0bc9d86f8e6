// Race: two lanes, each with its own clock, then the verdict.

import { Figure } from "./figure.js";
import { wake, you } from "./live.js";
import { parts, say, sayLinked } from "./words.js";

export function mount({ element, props, watch }) {
  const part = parts(element.closest("#race"));
  const figure = new Figure(part.figure);
  const root = document.documentElement;

  watch("value", () => {
    const { state, lanes = [], caption, notice, verdict, prompt, client, figure: drawn } = props.value;
    if (client) you.client = client;
    if (state === "waiting" && root.dataset.race !== "waiting") wake();
    root.dataset.race = state;
    say(part.caption, caption);
    if (prompt) for (const name of ["naive", "cached"]) say(part[`${name}-prompt`], lastSentence(prompt));
    for (const lane of lanes) showLane(part, lane);
    if (state === "waiting" && !lanes.length) clear(part, figure);
    sayLinked(part.notice, notice ?? "");
    part.notice.hidden = !part.notice.textContent;
    for (const name of ["ratio", "naive", "cached", "same"]) say(part[name], verdict?.[name] ?? clockOf(lanes, name));
    if (drawn) figure.update(drawn);
  });
}

function showLane(part, { name, text, tokens, target, total_s, ms_per_token, state }) {
  const speed = ms_per_token ? ` · ${(1000 / ms_per_token).toFixed(1)} tokens/s · ${total_s.toFixed(1)} s` : "";
  say(part[`${name}-said`], tokens || state === "running" ? `${tokens} of ${target}${speed}` : "waiting for its turn");
  say(part[`${name}-text`], text);
  part[`${name}-page`].toggleAttribute("data-writing", state === "running");
  part[`${name}-page`].scrollTop = part[`${name}-page`].scrollHeight;
  part[`${name}-bar`].style.width = `${(100 * tokens) / target}%`;
}

function clear(part, figure) {
  for (const name of ["naive", "cached"]) showLane(part, { name, text: "", tokens: 0, target: 1, state: "waiting" });
  figure.update(null);
}

function clockOf(lanes, name) {
  const lane = lanes.find((candidate) => candidate.name === name);
  return lane?.total_s ? `${lane.total_s.toFixed(1)} s` : "–";
}

/** The end of the prompt, enough to see what the lanes go on from. */
function lastSentence(text) {
  const start = text.slice(0, -2).search(/[^.!?]*$/);
  return start > 0 ? `…${text.slice(start)}` : text;
}
