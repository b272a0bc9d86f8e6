// The little Markdown that small models write, as nodes. Nothing is ever parsed as HTML.

const INLINE = /(`[^`]+`|\*\*[^*]+\*\*|\*[^*\s][^*]*\*)/;
const ITEM = /^\s*(?:[-*+]|\d+[.)])\s+/;

/** The blocks of `text`: paragraphs, lists, headings and code. */
export function markdown(text) {
  return text.split(/(```[\s\S]*?(?:```|$))/).flatMap((part) => (part.startsWith("```") ? [code(part)] : blocks(part)));
}

function code(part) {
  const pre = document.createElement("pre");
  pre.textContent = part.replace(/^```[^\n]*\n?/, "").replace(/\n?```$/, "");
  return pre;
}

function blocks(part) {
  const nodes = [];
  for (const line of part.split("\n")) {
    const last = nodes.at(-1);
    const heading = /^#{1,6}\s+/.exec(line);
    if (!line.trim()) nodes.push(null);
    else if (heading) nodes.push(inline("h4", line.slice(heading[0].length)));
    else if (ITEM.test(line)) listFor(line, nodes).append(inline("li", line.replace(ITEM, "")));
    else if (last?.tagName === "P") last.append("\n", ...inline("p", line).childNodes);
    else nodes.push(inline("p", line));
  }
  return nodes.filter(Boolean);
}

function listFor(line, nodes) {
  const tag = /^\s*\d/.test(line) ? "OL" : "UL";
  const last = nodes.findLast(Boolean);
  if (last?.tagName === tag) return last;
  const list = document.createElement(tag);
  if (tag === "OL") list.start = Number.parseInt(line, 10);
  nodes.push(list);
  return list;
}

function inline(tag, text) {
  const node = document.createElement(tag);
  for (const piece of text.split(INLINE)) {
    const [, mark] = /^(`|\*\*|\*)/.exec(piece) ?? [];
    if (mark && piece.length > 2 * mark.length && INLINE.test(piece)) {
      const child = document.createElement({ "`": "code", "**": "strong", "*": "em" }[mark]);
      child.textContent = piece.slice(mark.length, -mark.length);
      node.append(child);
    } else node.append(piece);
  }
  return node;
}
