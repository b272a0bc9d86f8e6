// A tour in five steps that drives the real page: it presses the page's own buttons and waits for what they bring.

import { onLive } from "./live.js";
import { parts, say } from "./words.js";

const root = document.documentElement;
const read = (selector) => document.querySelector(selector)?.textContent.trim() ?? "";
const press = (selector) => document.querySelector(selector)?.click();

/** The most requests that were written at one moment of the last half minute: they may be gone before anybody looks. */
function together({ requests }) {
  const written = requests.filter(({ decode }) => decode);
  const beside = ({ decode }) => written.filter((other) => other.decode <= decode && decode < (other.ended ?? Infinity));
  return Math.max(0, ...written.map((entry) => beside(entry).length));
}

const STEPS = [
  {
    panel: "#chat",
    say: () => "One model answers everybody here, all in one batch. Ask it something, and watch the answer stream.",
    act: ["Ask for me", () => press("#chips .starter")],
    done: () => read("#conversation article.assistant:last-of-type .text").length > 0,
  },
  {
    panel: "#speed-now",
    tab: "speed",
    say: () => (/×/.test(read('#speed-now [data-part="ratio"]'))
      ? `Measured, not guessed: a token comes ${read('#speed-now [data-part="ratio"]')} ${read('#speed-now [data-part="at"]')}. The longer the text, the wider the gap.`
      : "Beside your answer, a step without the cache is measured now and then. The number says how many times faster the cache is."),
  },
  {
    panel: "#cache-growth",
    tab: "cache",
    say: () => `That is the price: every token leaves its keys and values in memory. Now: ${read('#cache-growth header [data-part="caption"]')}.`,
  },
  {
    panel: "#batch-timeline",
    tab: "batch",
    say: (live) => {
      if (live.running > 1) return `${live.running} requests share each step of the model now, ${live.tokens_per_second.toFixed(live.tokens_per_second < 10 ? 1 : 0)} tokens a second between them.`;
      if (together(live) > 1) return `${together(live)} requests shared each step of the model a moment ago.`;
      return "Strangers share your batch. Nobody else here? Bring some: real requests, to the same model.";
    },
    act: ["Bring visitors", () => press("#visitors")],
    done: (live) => together(live) > 1,
  },
  {
    panel: "#race",
    tab: "race",
    say: () => (root.dataset.race === "finished"
      ? `${read('#race [data-part="explanation"]')} That is all: everything here was measured while you watched.`
      : "And the proof: the same text with and without the cache, each step timed alone."),
    act: ["Start the race", () => press("#race-start")],
    done: () => root.dataset.race === "finished",
  },
];

export function mount({ element }) {
  const part = parts(element);
  let step = null;
  let acted = false;
  let live = { running: 0, tokens_per_second: 0, requests: [] };

  const show = () => {
    if (step === null) return;
    const { say: words, act, done } = STEPS[step];
    const waiting = Boolean(act) && !done(live);
    say(part.count, `${step + 1} of ${STEPS.length}`);
    say(part.said, words(live));
    part.act.hidden = !act || acted || !waiting;
    if (act) say(part.act, act[0]);
    say(part.next, step === STEPS.length - 1 ? "Finish" : waiting ? "Skip" : "Next");
  };
  const go = (to) => {
    document.querySelector("[data-toured]")?.removeAttribute("data-toured");
    step = to < STEPS.length ? to : null;
    acted = false;
    part.card.hidden = step === null;
    if (step === null) {
      part.open.focus();
      return;
    }
    const { panel, tab } = STEPS[step];
    if (tab) press(`#tabs [data-tab="${tab}"]`);
    const node = document.querySelector(panel);
    node.setAttribute("data-toured", "");
    node.scrollIntoView({ block: "nearest" });
    show();
    part.card.focus();
  };

  document.querySelector("#header .tagline")?.after(part.open); // where it is in nobody's way
  part.open.addEventListener("click", () => go(0));
  part.next.addEventListener("click", () => go(step + 1));
  part.close.addEventListener("click", () => go(STEPS.length));
  part.act.addEventListener("click", () => {
    acted = true;
    STEPS[step].act[1]();
    show();
    part.next.focus();
  });
  element.addEventListener("keydown", ({ key }) => key === "Escape" && step !== null && go(STEPS.length));
  onLive((message) => {
    live = message;
    show();
  });
  // What the page shows between two messages counts, too: the first words of an answer, the end of a race.
  new MutationObserver(show).observe(root, { attributeFilter: ["data-race", "data-answering"] });
}
