// The quiet last line: what is seen by whom, and which weights are loaded.

import { modelName } from "./header.js";
import { tellHeight } from "./embed.js";
import { here, onLive } from "./live.js";
import { parts, say } from "./words.js";

export function mount({ element }) {
  const part = parts(element);
  tellHeight();
  part.link.href = here.split(/[?#]/)[0];
  onLive(({ model }) => {
    if (!model) return;
    const base = model.chat_template ? "" : " It has not been taught to chat: it continues a plain dialogue.";
    say(part.weights, `Weights: ${model.source}.${base}`);
    say(part.model, modelName(model));
  });
}
