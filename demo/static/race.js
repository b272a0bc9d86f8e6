// Race: lanes, each with its own clock, then the verdict and the gap taken apart.

import { Figure } from "./figure.js";
import { sayTerms } from "./glossary.js";
import { wake, you } from "./live.js";
import { showResult } from "./race_result.js";
import { parts, say, sayLinked } from "./words.js";

const EMPTY = {
  clocks: "All lanes go on from the same text. The lane whose clock is behind steps next.",
  steps: "What a token costs as the text grows: flat with a cache, climbing without.",
  gap: "At the end of a race: where the time between the slowest and the fastest lane went.",
};
const SAYS = {
  clocks: "A lane's clock is the sum of its own steps, each timed while nothing else ran.",
  steps: "With a cache a step reads one token more each time; without, the whole text again.",
};
const root = document.documentElement;

export function mount({ element, props, watch }) {
  const card = element.closest("#race");
  const part = parts(card);
  const figure = new Figure(part.figure);
  let chosen = "clocks";

  const draw = () => {
    const { figures, verdict } = props.value ?? {};
    for (const button of part.switch.children) button.setAttribute("aria-checked", button.dataset.figure === chosen);
    for (const button of part.switch.children) button.tabIndex = button.dataset.figure === chosen ? 0 : -1;
    say(part.empty, EMPTY[chosen]);
    const drawn = figures?.[chosen] ?? null;
    sayTerms(part.explanation, drawn ? (chosen === "gap" ? verdict?.said : SAYS[chosen]) ?? "" : "");
    figure.update(drawn);
  };
  const choose = (name) => {
    chosen = name;
    draw();
  };
  part.switch.addEventListener("click", ({ target }) => target.dataset.figure && choose(target.dataset.figure));
  part.switch.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...part.switch.children];
    const next = buttons[(buttons.indexOf(event.target) + step + buttons.length) % buttons.length];
    choose(next.dataset.figure);
    next.focus();
  });

  const show = () => {
    const { state, lanes, caption, notice, verdict, prompt, client, result, settings } = props.value;
    if (client) you.client = client;
    if (state === "waiting" && root.dataset.race !== "waiting") {
      wake();
      if (chosen === "gap") chosen = "clocks";
    }
    if (state === "finished") chosen = "gap";
    root.dataset.race = state;
    if (caption) say(part.caption, caption);
    if (lanes.length) showLanes(part.lanes, lanes, prompt);
    sayLinked(part.notice, notice ?? "");
    part.notice.hidden = !part.notice.textContent;
    for (const name of ["ratio", "same"]) say(part[name], verdict?.[name] ?? "–");
    const ends = { slowest: lanes[0], fastest: lanes.at(-1) };
    for (const [name, lane] of Object.entries(ends)) {
      say(part[`${name}-name`], lane?.title ?? name);
      say(part[name], verdict?.[name] ?? clockOf(lane));
    }
    showResult(part, result, lanes, settings);
    draw();
  };
  watch("value", show);
  show();
}

function showLanes(container, lanes, prompt) {
  container.toggleAttribute("data-many", lanes.length > 2);
  const names = lanes.map((lane) => lane.name).join();
  if (container.dataset.names !== names) {
    container.dataset.names = names;
    container.replaceChildren(...lanes.map(makeLane));
  }
  lanes.forEach((lane, index) => showLane(parts(container.children[index]), lane, prompt));
}

function makeLane({ name, title }) {
  const section = document.createElement("section");
  section.className = `lane ${name.startsWith("naive") ? "naive" : "cached"}`;
  section.dataset.lane = name;
  section.innerHTML =
    '<h3></h3><p data-part="said"></p><i class="bar"><i data-part="bar"></i></i>' +
    '<p class="text" data-part="page"><span class="prompt" data-part="prompt"></span><span data-part="text"></span></p>';
  section.firstChild.textContent = title;
  return section;
}

function showLane(part, { says, text, tokens, target, total_s, ms_per_token, state }, prompt) {
  const speed = ms_per_token ? ` · ${(1000 / ms_per_token).toFixed(1)} tokens/s · ${total_s.toFixed(1)} s` : "";
  say(part.said, tokens || state === "running" ? `${tokens} of ${target}${speed}` : says);
  say(part.prompt, prompt ? lastSentence(prompt) : "");
  say(part.text, text);
  part.page.toggleAttribute("data-writing", state === "running");
  part.page.scrollTop = part.page.scrollHeight;
  part.bar.style.width = `${(100 * tokens) / target}%`;
}

const clockOf = (lane) => (lane?.total_s ? `${lane.total_s.toFixed(1)} s` : "–");

/** The end of the prompt, enough to see what the lanes go on from. */
function lastSentence(text) {
  const start = text.slice(0, -2).search(/[^.!?]*$/);
  return start > 0 ? `…${text.slice(start)}` : text;
}
