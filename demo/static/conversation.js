// The conversation. `value` is {messages: [{role, text, note}]} and, while or after an answer is written:
// pending {label, progress}, streaming, notice, used and limit (tokens of context), client (your number).

import { wake, you } from "./live.js";
import { markdown } from "./markdown.js";
import { count, parts, say } from "./words.js";

const root = document.documentElement;

export function mount({ element, props, watch, trigger }) {
  const part = parts(element);
  const shown = [];

  const render = () => {
    const { messages = [], pending, streaming, notice, used, limit, client } = props.value ?? {};
    const near = part.scroll.scrollHeight - part.scroll.scrollTop - part.scroll.clientHeight < 80;
    if (client) you.client = client;
    if (pending?.label === "sending") wake();
    root.toggleAttribute("data-answering", Boolean(pending || streaming));
    root.toggleAttribute("data-talking", messages.length > 0);
    part.welcome.hidden = messages.length > 0;

    while (shown.length > messages.length) shown.pop().node.remove();
    messages.forEach((message, index) => {
      if (shown[index]?.role !== message.role) shown.splice(index).forEach(({ node }) => node.remove());
      shown[index] ??= new Message(message.role, part.messages, trigger);
      const last = index >= messages.length - 2 && !pending && !streaming;
      shown[index].show(message, { writing: streaming && index === messages.length - 1, last });
    });

    part.pending.toggleAttribute("data-open", Boolean(pending));
    say(part.label, pending?.label ?? "");
    part.bar.parentElement.toggleAttribute("data-open", pending?.progress !== undefined);
    part.bar.style.width = `${100 * (pending?.progress ?? 0)}%`;
    say(part.notice, notice ?? "");
    part.notice.hidden = !notice;
    say(part.context, used ? `${count(used)} of ${count(limit)} tokens of context used` : "");
    if (near || pending) part.scroll.scrollTop = part.scroll.scrollHeight;
  };

  watch("value", render);
  render();
}

/** One message: its text, and under it what can be said of it and done with it. */
class Message {
  constructor(role, parent, trigger) {
    this.role = role;
    this.node = document.createElement("article");
    this.node.className = role;
    this.body = this.node.appendChild(document.createElement("div"));
    this.body.className = "text";
    const foot = this.node.appendChild(document.createElement("footer"));
    this.note = foot.appendChild(document.createElement("span"));
    const actions = foot.appendChild(document.createElement("span"));
    actions.className = "actions-of-message";
    this.button(actions, "Copy", () => navigator.clipboard?.writeText(this.text), "");
    if (role === "assistant") this.button(actions, "Retry", () => trigger("retry"), "last-only");
    else this.button(actions, "Edit", () => trigger("edit"), "last-only");
    parent.append(this.node);
  }

  button(parent, label, action, className) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: label, className });
    button.addEventListener("click", action);
    parent.append(button);
  }

  show({ text, note }, { writing, last }) {
    if (this.text !== text) {
      this.text = text;
      if (this.role === "assistant") this.body.replaceChildren(...markdown(text));
      else this.body.textContent = text;
    }
    say(this.note, note ?? "");
    this.node.toggleAttribute("data-writing", Boolean(writing));
    this.node.toggleAttribute("data-last", Boolean(last));
  }
}
