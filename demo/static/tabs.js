// On narrow screens one panel at a time; the large number stays in sight.

import { say } from "./words.js";

const root = document.documentElement;

export function showRatio(text) {
  const node = document.querySelector('#tabs [data-part="ratio"]');
  if (node) say(node, text);
}

export function mount({ element }) {
  const buttons = [...element.querySelectorAll("button")];
  const choose = (tab) => {
    root.dataset.tab = tab;
    for (const button of buttons) button.setAttribute("aria-selected", button.dataset.tab === tab);
  };
  for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.tab));
  choose(root.dataset.tab ?? "speed");
}
