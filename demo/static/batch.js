// The batch: a bar a request; yours says "you", brought visitors say so, nobody else has a name. Scrolled back, the
// past is fetched, and fetched again now and then.

import { Figure } from "./figure.js";
import { sayTerms } from "./glossary.js";
import { onLive, wake, you } from "./live.js";
import { count, parts, say } from "./words.js";

const LIVE_S = 30, KEPT_S = 600, FETCH_EVERY_MS = 5000;
const MOST_NAMED_LANES = 12;
const SHORTEST_NAMED_PX = 64;
const ENDINGS = { length: "cut at its limit", cancelled: "cancelled", eos_token: "ended by itself", stop_sequence: "ended by itself", error: "failed" };

export function mount({ element }) {
  const part = parts(element);
  const figure = new Figure(part.figure);
  const brought = new Set();
  const legend = part.detail.textContent;
  let requests = new Map();
  let fetched = 0;

  const asked = () => ({ window: Number(part.window.value), back: Number(part.back.value) });
  const isLive = () => asked().window === LIVE_S;
  const show = ({ data, layout }, entries) => {
    requests = new Map(entries.map((entry) => [String(entry.request), entry]));
    offer(part.request, entries, brought);
    sayTerms(part.detail, requests.has(part.request.value) ? story(requests.get(part.request.value), brought) : legend);
    const anybody = data.some((trace) => trace.type === "bar" && trace.y.length);
    const named = names(data, layout, brought, part.figure.clientWidth);
    figure.update(anybody ? { data, layout: { ...layout, annotations: [...layout.annotations, ...named] } } : null);
  };
  const fetchPast = async () => {
    fetched = performance.now();
    const query = new URLSearchParams(asked());
    const response = await fetch(new URL(`timeline?${query}`, import.meta.url), { cache: "no-store" });
    if (!response.ok || isLive()) return;
    const past = await response.json();
    show(past.figure, past.requests);
  };

  document.addEventListener("click", ({ target }) => target.closest("#visitors") && wake());
  part.window.addEventListener("change", () => {
    part["scroll-back"].hidden = isLive();
    part.back.value = 0;
    part.back.step = Math.min(asked().window, LIVE_S);
    part.back.max = KEPT_S - asked().window;
    part.back.disabled = part.back.max === "0";
    if (isLive()) wake();
    else fetchPast();
  });
  part.back.addEventListener("change", fetchPast);
  part.request.addEventListener("change", () => {
    const entry = requests.get(part.request.value);
    sayTerms(part.detail, entry ? story(entry, brought) : legend);
  });
  figure.onPress((point) => {
    const request = point.customdata?.[3];
    if (request === undefined) return;
    part.request.value = String(request);
    part.request.dispatchEvent(new Event("change"));
  });
  onLive((live) => {
    live.brought.forEach((client) => brought.add(client));
    const { running, waiting, most, tokens_per_second: speed } = live;
    say(part.caption, `${count(running)} of ${count(most)} rows · ${count(waiting)} waiting · ${count(speed)} tokens/s`);
    if (isLive()) show(live.figures.batch, live.requests);
    else if (performance.now() - fetched > FETCH_EVERY_MS) fetchPast();
  });
}

const whose = ({ client }, brought) => (client === you.client && client ? "you" : brought.has(client) ? "brought" : "a stranger");

/** The requests to choose from, newest first; the chosen one stays, and so does an open list. */
function offer(select, entries, brought) {
  const chosen = select.value;
  const wanted = entries.map(({ request }) => String(request)).reverse();
  if (document.activeElement === select || wanted.join() === select.dataset.offered) return;
  select.dataset.offered = wanted.join();
  const options = [...entries].reverse().map((entry) => new Option(`${whose(entry, brought)} · request ${entry.request}`, entry.request));
  select.replaceChildren(select.options[0], ...options);
  select.value = wanted.includes(chosen) ? chosen : "";
}

/** What became of one request, in numbers. */
function story(entry, brought) {
  const { queued, prefill, decode, ended, tokens, prompt_tokens: prompt, reused_tokens: reused, public_tokens: open, chunks, finish_reason: reason } = entry;
  const seconds = (from, to) => `${Math.max(to - from, 0).toFixed(2)} s`;
  const pieces = chunks.length > 1 ? `, read in ${count(chunks.length)} chunks` : "";
  const told = [`Request ${entry.request}, ${whose(entry, brought)}`];
  told.push(prefill ? `in line ${seconds(queued, prefill)}` : "in line");
  told.push(`${count(prompt)} tokens of prompt${reused ? `, ${count(reused)} of them taken over${open ? ` (${count(open)} public)` : ""}` : ""}${pieces}`);
  if (decode) told.push(`first token after ${seconds(queued, decode)}`);
  if (tokens > 1 && ended > decode) told.push(`${count(tokens)} tokens at ${((tokens - 1) / (ended - decode)).toFixed(1)} a second`);
  else if (tokens) told.push(`${count(tokens)} tokens so far`);
  if (reason) told.push(ENDINGS[reason] ?? reason);
  return `${told.join(" · ")}.`;
}

/** A name at the start of each bar that has one, while the bars are thick enough to read it and no lines cut them. */
function names(data, layout, brought, width) {
  if (layout.yaxis.range[0] > MOST_NAMED_LANES || data.some((trace) => trace.name === "steps")) return [];
  const [first, last] = layout.xaxis.range;
  const bars = data.find((trace) => trace.name === "decode");
  return bars.y.flatMap((lane, bar) => {
    const [client] = bars.customdata[bar];
    const yours = client === you.client;
    const text = yours ? "you" : brought.has(client) ? "brought" : "";
    if (!text || (bars.x[bar] * width) / (last - first) < SHORTEST_NAMED_PX) return [];
    return { text, x: bars.base[bar], y: lane, xanchor: "left", xshift: 4, showarrow: false,
      font: { color: yours ? "var(--on-you)" : "var(--on-bar)", size: 12 } };
  });
}
