// Speed now: your conversation's measurements, or before you spoke, everybody's.

import { Figure } from "./figure.js";
import { sayTerms } from "./glossary.js";
import { onLive } from "./live.js";
import { showRatio } from "./tabs.js";
import { count, parts, plural, say } from "./words.js";

export function mount({ element, props, watch }) {
  const part = parts(element);
  const figure = new Figure(part.figure);

  const numbers = ({ ratio, at, cached, naive, counted, caption, explanation }) => {
    say(part.ratio, ratio);
    say(part.at, at);
    say(part.cached, cached);
    say(part.naive, naive);
    say(part.count, counted);
    say(part.caption, caption);
    sayTerms(part.explanation, explanation);
    part.numbers.toggleAttribute("data-empty", !cached);
    showRatio(cached ? ratio : "");
  };

  const yours = ({ ratio, at, cached_ms, naive_ms, measured, caption, explanation, pending, figure: drawn }) => {
    if (pending) {
      numbers({ ratio: "Measuring…", at: "your first step without a cache", cached: "", naive: "", counted: "",
        caption, explanation: pending });
      figure.update(null);
      return;
    }
    numbers({ ratio: times(ratio), at: `${faster(ratio)} with the cache, ${at}`,
      cached: duration(cached_ms), naive: duration(naive_ms), counted: `without, ${measured}`,
      caption, explanation });
    figure.update(drawn);
  };

  const others = ({ measured, figures, last_probe: probe }) => {
    figure.update(figures.others);
    if (!probe) {
      numbers({ ratio: "How many times faster?", at: "Nobody has spoken yet: be the first.", cached: "", naive: "", counted: "",
        caption: "nothing measured yet", explanation: "Each naive point will be one real step without a cache, measured while you read." });
      return;
    }
    const ratio = probe.naive_ms / probe.cached_ms;
    numbers({ ratio: times(ratio), at: `${faster(ratio)} with the cache, at ${count(probe.length)} tokens`,
      cached: duration(probe.cached_ms), naive: duration(probe.naive_ms), counted: "without the cache",
      caption: "measured in other people's conversations",
      explanation: `${plural(measured, "point")} from other people's conversations. Ask something to see your own.` });
  };

  let latest = null;
  const render = () => {
    if (props.value) yours(props.value);
    else if (latest) others(latest);
  };
  watch("value", render);
  onLive((live) => {
    latest = live;
    if (!props.value) render();
  });
}

const faster = (ratio) => (ratio >= 1 ? "faster" : "as fast");
const times = (ratio) => `${ratio >= 100 ? Math.round(ratio) : ratio.toFixed(1)}×`;
const duration = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms >= 10 ? count(ms) : ms.toFixed(1)} ms`);
