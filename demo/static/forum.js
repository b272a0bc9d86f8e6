// The forum's experiment: its times, and those of this machine.

import { parts, say } from "./words.js";

export function mount({ element, props, watch }) {
  const part = parts(element);
  const show = () => {
    const { said, rows, forum } = props.value;
    say(part.answer, said);
    part["answer-table"].hidden = !rows;
    if (!rows) return;
    part.answers.replaceChildren(...rows.map(({ order, warm, seconds }) =>
      row([order[0] === "by_hand" ? "by hand first" : "generate() first", warm ? "again, warm" : "fresh process"].join(", "), seconds)));
    part.answers.append(row("in the forum", forum));
  };
  watch("value", show);
  show();
}

function row(name, { by_hand, generate }) {
  const line = document.createElement("tr");
  [name, by_hand.toFixed(2), generate.toFixed(2)].forEach((text, index) => {
    const cell = document.createElement(index ? "td" : "th");
    cell.textContent = text;
    line.append(cell);
  });
  return line;
}
