// Name, model and the state of the whole server; a banner when it is not ready.

import { onLive, you } from "./live.js";
import { count, parts, plural, say } from "./words.js";

const SENTENCES = {
  loading: "The model is loading.",
  restarting: "The worker stopped and is starting again. Running answers carry on where they were.",
  draining: "The server is about to restart: answers under way get some seconds to finish, new questions are refused.",
  stopped: "The engine has stopped. The page shows what was last known.",
};
const FULL = "The line is full. A new question is told when to come back; those in line keep their places.";
const CONNECTION = {
  lost: "The connection is lost. The page tries again by itself; what you wrote stays here.",
  gone: "The server was started anew and does not know this page: load it again to ask more.",
};
const DTYPES = { float32: "fp32", float16: "fp16", bfloat16: "bf16" };

export function modelName({ name, device, dtype }) {
  return `${name} · ${device.startsWith("cuda") ? "GPU" : device.toUpperCase()} · ${DTYPES[dtype] ?? dtype}`;
}

export function mount({ element }) {
  const part = parts(element);
  onLive((live) => {
    if (live.model) say(part.model, modelName(live.model));
    else say(part.model, live.worker === "loading" ? "model loading" : live.worker);
    say(part.running, count(live.running));
    say(part.waiting, count(live.waiting));
    say(part.speed, count(live.tokens_per_second));
    say(part.lease, live.lease ? leaseSentence(live.lease) : "");
    part.lease.hidden = !live.lease;
    say(part.said, CONNECTION[document.documentElement.dataset.connection] ?? sentence(live));
    part.banner.toggleAttribute("data-open", Boolean(part.said.textContent));
    const { done, total } = live.loading ?? {};
    part.bar.parentElement.toggleAttribute("data-open", Boolean(total));
    part.bar.style.width = total ? `${(100 * done) / total}%` : "0";
  });
  new MutationObserver(() => {
    const said = CONNECTION[document.documentElement.dataset.connection];
    if (said) say(part.said, said);
    if (said) part.banner.toggleAttribute("data-open", true);
  }).observe(document.documentElement, { attributeFilter: ["data-connection"] });
}

/** Who pays for the GPU that everybody here shares, and for how long. */
function leaseSentence({ state, payer, asked, asked_s, left_s, sharing, handovers }) {
  const before = handovers ? ` · ${plural(handovers, "handover")} so far` : "";
  if (state === "none") return `No GPU is held now: the next question asks for one${before}`;
  const whose = payer && payer === you.client ? "at your expense" : "at another visitor's expense";
  if (state === "asked") return `Asking for ${asked}, ${whose} · ${count(asked_s)} s so far · ${plural(sharing, "request")} will share it${before}`;
  return `GPU lease ${whose} · ${count(left_s)} s left · shared by ${plural(sharing, "request")}${before}`;
}

function sentence({ worker, loading, error, full }) {
  if (error) return error;
  if (loading) {
    const size = loading.total > 1e6 ? ` ${count(loading.done / 1e6)} of ${count(loading.total / 1e6)} MB` : "";
    return `The model is loading: ${loading.stage}${size}`;
  }
  return SENTENCES[worker] ?? (full ? FULL : "");
}
