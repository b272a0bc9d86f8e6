// The state of the page that all panels share: what is shown (from the address), who "you" are,
// and the message about everybody, fetched once a second while something runs.

import { renew } from "./keep.js";

const ACTIVE_MS = 1000, IDLE_MS = 4000, RETRY_MS = 2000;
const LOOKS_AFTER_WAKING = 3;
const root = document.documentElement;
const listeners = new Set();
let latest = null;
let timer = null;
let inSight = true; // false for a frame that its page has scrolled away
let looks = 0;
let server = null; // which run of the server this page belongs to
let broken = false; // Gradio's connection

export const you = { client: null };

const component = document.querySelector("gradio-app[src]"); // on another site's page, without a frame

/** The page's own address. */
export const here = component?.getAttribute("src") ?? location.href;

/** Call `listener` with every message about everybody, and at once with the latest one. */
export function onLive(listener) {
  listeners.add(listener);
  if (latest) listener(latest);
}

/** Ask now and soon again: something has just begun, or will when the server has heard of it. */
export function wake() {
  looks = LOOKS_AFTER_WAKING;
  clearTimeout(timer);
  timer = setTimeout(poll, 150);
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden || !inSight) {
    root.dataset.connection = "paused";
    return;
  }
  let pause = RETRY_MS;
  try {
    const response = await fetch(new URL("live", import.meta.url), { cache: "no-store" });
    if (!response.ok) throw new Error(response.statusText);
    latest = await response.json();
    server ??= latest.server;
    const away = root.dataset.connection !== "open"; // else there are several servers, and this page belongs to all
    const strange = broken || (away && latest.server !== server);
    if (strange && !component) return renew();
    root.dataset.connection = strange ? "gone" : "open"; // another site's page is not ours to load anew
    root.dataset.worker = latest.worker;
    for (const listener of listeners) listener(latest);
    pause = latest.active || !["ready", "none"].includes(latest.worker) || looks-- > 0 ? ACTIVE_MS : IDLE_MS;
  } catch {
    root.dataset.connection = "lost";
  }
  clearTimeout(timer);
  timer = setTimeout(poll, pause);
}

/**
 * Once Gradio has lost its connection it does nothing any more but ask for `app_id`, on and on, to load the page anew as
 * soon as it is answered: what was typed and said would be gone. So it gets no answer, and this page comes back itself.
 */
function watchGradio() {
  const fetchAnything = window.fetch;
  window.fetch = (resource, options) => {
    if (!/\/gradio_api\/app_id\b/.test(resource.url ?? resource)) return fetchAnything(resource, options);
    for (const button of document.querySelectorAll(".toast-close")) button.click();
    if (!broken) poll();
    broken = true;
    return Promise.reject(new TypeError("not asked: see live.js"));
  };
}

function readAddress() {
  const query = new URLSearchParams(location.search);
  const view = query.get("view");
  if (["race", "cache", "batch", "chat"].includes(view)) root.dataset.view = view;
  root.toggleAttribute("data-compact", query.get("compact") === "1");
  root.toggleAttribute("data-embedded", window.self !== window.top || Boolean(component));
  root.dataset.tab = "speed";
}

readAddress();
watchGradio();
document.addEventListener("visibilitychange", poll);
new IntersectionObserver(([entry]) => {
  if (inSight === entry.isIntersecting) return;
  inSight = entry.isIntersecting;
  poll();
}).observe(root);
poll();
