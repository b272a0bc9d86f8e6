// The conversation. `value` is {messages: [{role, text, note, answer, format}]}, where `answer` is the key of its tokens,
// and, while or after an answer is written: pending {label, progress}, streaming, notice, used and limit (tokens of
// context), client (your number).

import { indented } from "./json.js";
import { keep } from "./keep.js";
import { wake, you } from "./live.js";
import { markdown } from "./markdown.js";
import { TokenView } from "./tokens.js";
import { count, parts, say, sayLinked } from "./words.js";

const root = document.documentElement;
const SILENCE_MS = 20_000; // of a server that says something each second while it answers
const BROKE_OFF = "The connection broke while this was answered. Retry asks again; Edit takes the question back.";

export function mount({ element, props, watch, trigger }) {
  const part = parts(element);
  const shown = [];
  let heard = 0;

  const show = (value) => {
    props.value = value;
    render();
  };
  const breakOff = () => {
    const { pending, streaming, ...kept } = props.value ?? {};
    if (pending || streaming) show({ ...kept, notice: BROKE_OFF });
  };

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
    sayLinked(part.notice, notice ?? "");
    part.notice.hidden = !notice;
    say(part.context, used ? `${count(used)} of ${count(limit)} tokens of context used` : "");
    if (near || pending) part.scroll.scrollTop = part.scroll.scrollHeight;
  };

  watch("value", () => {
    heard = Date.now();
    render();
  });
  setInterval(() => Date.now() - heard > SILENCE_MS && breakOff(), 1000);
  new MutationObserver(() => ["lost", "gone"].includes(root.dataset.connection) && breakOff()).observe(root, {
    attributeFilter: ["data-connection"],
  });
  const before = keep("conversation", () => props.value);
  if (before) show(before);
  else render();
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
    if (role === "assistant") {
      this.toggle = this.button(actions, "Tokens", () => this.toggleTokens(), "also-writing");
      this.toggle.ariaPressed = "false";
      this.hint = Object.assign(document.createElement("p"), { className: "hint", role: "status" });
      this.body.after(this.hint);
    }
    this.button(actions, "Copy", () => navigator.clipboard?.writeText(this.text), "");
    if (role === "assistant") this.button(actions, "Retry", () => trigger("retry"), "last-only");
    else this.button(actions, "Edit", () => trigger("edit"), "last-only");
    parent.append(this.node);
  }

  button(parent, label, action, className) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: label, className });
    button.addEventListener("click", action);
    // It moves as the text above it grows; whoever has pressed it means it, wherever it is by the time they let go.
    button.addEventListener("pointerdown", (event) => button.setPointerCapture(event.pointerId));
    parent.append(button);
    return button;
  }

  show({ text, note, answer, format }, { writing, last }) {
    if (this.toggle) this.toggle.hidden = !answer;
    if (this.answer !== answer) this.hideTokens();
    const grown = this.text !== text;
    Object.assign(this, { text, answer, format });
    if (grown && !this.tokens?.node.isConnected) this.showText();
    // The note changes with every token, also with those that have no text.
    if (this.tokens && this.note.textContent !== note) this.tokens.refresh();
    say(this.note, note ?? "");
    this.node.toggleAttribute("data-writing", Boolean(writing));
    this.node.toggleAttribute("data-last", Boolean(last));
  }

  showText() {
    const json = () => Object.assign(document.createElement("pre"), { className: "json", textContent: indented(this.text) });
    if (this.role === "user") this.body.textContent = this.text;
    else if (this.format === "json") this.body.replaceChildren(json());
    else this.body.replaceChildren(...markdown(this.text));
  }

  toggleTokens() {
    if (this.tokens) return this.hideTokens();
    const current = (act) => (...values) => this.tokens === view && act(...values);
    const view = new TokenView(this.answer, current(() => this.showTokens()), current((why) => this.hideTokens(why)));
    this.tokens = view;
    say(this.hint, "");
    this.toggle.ariaPressed = "true";
  }

  showTokens() {
    if (this.tokens.node.isConnected) return;
    this.body.replaceChildren(this.tokens.node);
    say(this.hint, "The stronger the tint, the less likely the model held the token. Point at one, tap it, or go by arrow keys.");
  }

  /** Back to the text; `why` stands under it. */
  hideTokens(why = "") {
    if (!this.tokens) return;
    this.tokens.close();
    this.tokens = null;
    this.toggle.ariaPressed = "false";
    this.showText();
    say(this.hint, why);
  }
}
