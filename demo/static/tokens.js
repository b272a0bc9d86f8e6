// An answer as its tokens: each tinted by how unlikely the model held it, and a card that says more about one.
// Fetched only when somebody wants to see them. All text goes in as text, never as HTML.

const AGAIN_MS = 700;

/** Probability, as people say it. */
function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share < 0.1) return "<0.1%";
  return share > 99.9 && share < 100 ? ">99.9%" : `${share.toFixed(1)}%`;
}

/** A token's text where what cannot be seen has to be. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/\p{C}/gu, "▯");
}

function element(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

export class TokenView {
  /** `answer` is the key that came with the message; `failed` is told, in a sentence, why there is nothing to see. */
  constructor(answer, shown, failed) {
    this.answer = answer;
    this.tokens = [];
    this.node = element("div", "tokens");
    this.node.role = "group";
    this.node.ariaLabel = "The answer as its tokens. The arrow keys go from one to the next.";
    this.node.ariaLive = "off";
    this.shown = shown;
    this.failed = failed;
    this.listen();
    this.refresh();
  }

  /** Fetch what has been written since; at most one fetch at a time, and one more if something happened meanwhile. */
  async refresh() {
    this.wanted = true;
    if (this.busy) return;
    this.busy = true;
    while (this.wanted) {
      this.wanted = false;
      await this.fetch();
      if (this.wanted) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
    this.busy = false;
  }

  async fetch() {
    const query = new URLSearchParams({ answer: this.answer, from: this.tokens.length });
    try {
      const response = await fetch(new URL(`tokens?${query}`, import.meta.url), { cache: "no-store" });
      const { tokens, kept } = await response.json();
      if (!tokens) this.failed(`The tokens of this answer are gone: they are kept for your last ${kept} answers.`);
      else {
        this.append(tokens);
        this.shown();
      }
    } catch {
      this.failed("The tokens could not be fetched. Try again in a moment.");
    }
  }

  append(tokens) {
    const scroll = this.node.closest('[data-part="scroll"]');
    const near = scroll && scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    for (const token of tokens) {
      const node = element("span", "token", token.text);
      // What has no text of its own is shown by a name that is not part of the text.
      if (token.special) node.dataset.name = token.name;
      else if (/^\n+$/.test(token.text)) node.dataset.name = "↵";
      else if (/^\p{C}*$/u.test(token.text)) node.dataset.name = "▯";
      node.style.setProperty("--doubt", 1 - Math.exp(token.logprob));
      node.tabIndex = this.tokens.length ? -1 : 0;
      this.tokens.push(token);
      this.node.append(node);
    }
    if (near) scroll.scrollTop = scroll.scrollHeight;
  }

  close() {
    card.close();
  }

  listen() {
    const { node } = this;
    const tokenOf = (event) => event.target.closest?.(".token");
    node.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse" && tokenOf(event)) this.open(tokenOf(event));
    });
    node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && card.close());
    node.addEventListener("click", (event) => tokenOf(event)?.focus());
    node.addEventListener("focusin", (event) => this.reach(tokenOf(event)));
    node.addEventListener("focusout", () => card.close());
    node.addEventListener("keydown", (event) => this.steer(event));
  }

  steer(event) {
    const { firstElementChild, lastElementChild } = this.node;
    const at = event.target;
    const next = {
      ArrowRight: at.nextElementSibling, ArrowLeft: at.previousElementSibling, Home: firstElementChild, End: lastElementChild,
    }[event.key];
    if (event.key === "Escape") card.close();
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  /** One token at a time can be reached by Tab: the one that had the focus last. (Where the pointer rests is chance.) */
  reach(node) {
    this.node.querySelector('[tabindex="0"]').tabIndex = -1;
    node.tabIndex = 0;
    this.open(node);
  }

  open(node) {
    card.open(node, this.tokens[[...this.node.children].indexOf(node)]);
  }
}

/** What is said about the token that is pointed at or has the focus; there is one for the whole page. */
const card = {
  node: Object.assign(element("div", "token-card"), { id: "token-card", role: "tooltip", hidden: true }),

  open(anchor, token) {
    this.close();
    this.anchor = anchor;
    const head = element("header", "");
    head.append(element("code", "", token.special ? token.name : visible(token.text || "▯")));
    head.append(element("output", "", percent(token.logprob)));
    this.node.replaceChildren(head, element("p", "", standing(token)), bars(token));
    this.node.append(element("p", "", "The model's own probabilities, before temperature, penalties and filters."));
    document.querySelector(".gradio-container").append(this.node);
    this.node.hidden = false;
    anchor.setAttribute("aria-describedby", this.node.id);
    this.place();
  },

  close() {
    this.node.hidden = true;
    this.anchor?.removeAttribute("aria-describedby");
    this.anchor = null;
  },

  /** Above the token where there is room, else below it; out of sight with it. (A line may end with its space.) */
  place() {
    if (!this.anchor) return;
    const box = [...this.anchor.getClientRects()].at(-1);
    const seen = this.anchor.closest('[data-part="scroll"]')?.getBoundingClientRect();
    if (!box || !seen || box.bottom < seen.top || box.top > seen.bottom) return this.close();
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), innerWidth - width - 8);
    const top = box.top - height - 8 >= 8 ? box.top - height - 8 : Math.min(box.bottom + 8, innerHeight - height - 8);
    Object.assign(this.node.style, { left: `${left}px`, top: `${top}px` });
  },
};

function standing({ text, special, top }) {
  const rank = top.findIndex(([, , chosen]) => chosen) + 1;
  const choice = ["not among the model's best five", "the model's first choice", "its second choice", "its third choice", "its fourth choice", "its fifth choice"][rank];
  if (special) return `a special token, without text: ${choice}`;
  return text ? choice : `part of a character or of something held back, whose text comes with a later token: ${choice}`;
}

/** The best tokens with bars as long as they are likely; the chosen one after them where it is none of them. */
function bars({ text, name, logprob, top }) {
  const list = element("ul", "");
  const rows = top.some(([, , chosen]) => chosen) ? top : [...top, [text || name, logprob, true]];
  for (const [label, score, chosen] of rows) {
    const row = element("li", chosen ? "chosen" : "");
    const bar = element("i", "bar");
    bar.append(element("i", ""));
    bar.firstChild.style.width = `${100 * Math.exp(score)}%`;
    row.append(element("code", "", visible(label)), bar, element("span", "", percent(score)));
    list.append(row);
  }
  return list;
}

addEventListener("scroll", () => card.place(), { capture: true, passive: true });
addEventListener("resize", () => card.close());
addEventListener("pointerdown", (event) => event.target.closest?.(".token") ?? card.close());
