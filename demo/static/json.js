// JSON on lines of its own while it is still being written.

/** `text` with one value a line; it may end anywhere. */
export function indented(text) {
  let out = "", depth = 0, quoted = false;
  const line = () => `\n${"  ".repeat(Math.max(depth, 0))}`;
  for (let n = 0; n < text.length; n += 1) {
    const c = text[n];
    if (quoted) {
      out += c === "\\" ? c + (text[++n] ?? "") : c;
      quoted = c !== '"';
    } else if (c === '"') {
      out += c;
      quoted = true;
    } else if (c === "{" || c === "[") {
      depth += 1;
      out += c + line();
    } else if (c === "}" || c === "]") {
      depth -= 1;
      out = /[{[]\s*$/.test(out) ? out.trimEnd() + c : out + line() + c;
    } else if (c === ",") out += c + line();
    else if (c === ":") out += ": ";
    else if (!/\s/.test(c)) out += c;
  }
  return out;
}
