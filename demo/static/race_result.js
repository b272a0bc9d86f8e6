// The end of a race: a table, and the same as files and as an address.

import { here } from "./live.js";
import { say } from "./words.js";

/** Fill the table and the links; without a `result`, hide them. */
export function showResult(part, result, lanes, settings) {
  part.result.hidden = !result;
  if (!result) return;
  part.rows.replaceChildren(...result.lanes.map((lane) => row(lane, lanes)));
  const { device, dtype, threads, prompt_tokens, date } = result.conditions;
  const threaded = device === "cpu" ? `, ${threads} threads` : "";
  say(part.conditions, `${prompt_tokens} tokens of prompt · ${device}, ${dtype}${threaded} · ${date.slice(0, 16).replace("T", " ")} UTC ·`);
  offer(part.json, "kvscope-race.json", "application/json", JSON.stringify(result, null, 1));
  offer(part.csv, "kvscope-race.csv", "text/csv", csv(result));
  part.link.href = address(settings);
}

function row(lane, lanes) {
  const { title } = lanes.find(({ name }) => name === lane.name);
  const shared = lane.rows > 1 ? ` (its share: ${lane.share_s.toFixed(2)})` : "";
  const cells = [title, lane.total_s.toFixed(2) + shared, lane.ms_per_token.toFixed(1),
    ((1000 * lane.rows) / lane.ms_per_token).toFixed(1), lane.first_call_ms.toFixed(1)];
  const line = document.createElement("tr");
  cells.forEach((text, index) => {
    const cell = document.createElement(index ? "td" : "th");
    cell.textContent = text;
    line.append(cell);
  });
  return line;
}

function offer(link, name, type, text) {
  if (link.href) URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
}

/** Every step in a line, under the conditions as comments. */
function csv({ conditions, lanes, ratio, gap }) {
  const facts = { ...conditions, ratio };
  for (const { cause, seconds } of gap.parts) facts[`gap: ${cause}`] = `${seconds} s`;
  const head = Object.entries(facts).map(([name, value]) => `# ${name}: ${value}`);
  const steps = lanes.flatMap(({ name, step_ms, forward_ms }) =>
    step_ms.map((ms, step) => [name, step + 1, conditions.prompt_tokens + step, ms, forward_ms[step]].join()));
  return [...head, "lane,token,context,step_ms,forward_ms", ...steps, ""].join("\n");
}

/** This page with the race's settings in its address. */
function address(settings) {
  const url = new URL(here);
  for (const [name, value] of Object.entries(settings)) url.searchParams.set(name, value);
  return url.href;
}
