// Numbers and counts as people say them.

export const count = (number) => Math.round(number).toLocaleString("en-US");
export const megabytes = (bytes) => {
  const size = bytes / 1e6;
  return `${size >= 100 ? count(size) : size.toFixed(1)} MB`;
};
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** The elements of a panel by the name in their `data-part`. */
export function parts(element) {
  return Object.fromEntries([...element.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
}

/** Set text only where it changed, so that a selection survives. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const LINK = /\[([^\]]+)\]\((https:\/\/huggingface\.co\/[^\s)]*)\)|https:\/\/huggingface\.co\/[^\s,)]*[^\s,).]/g;

/** `say`, with addresses of the hub as links, since that is where quotas are looked after; nothing else is one. */
export function sayLinked(node, text) {
  if (node.dataset.said === text) return;
  node.dataset.said = text;
  node.replaceChildren();
  let end = 0;
  for (const found of text.matchAll(LINK)) {
    const href = found[2] ?? found[0];
    const link = Object.assign(document.createElement("a"), { href, target: "_blank", rel: "noopener", textContent: found[1] ?? href });
    node.append(text.slice(end, found.index), link);
    end = found.index + found[0].length;
  }
  node.append(text.slice(end));
}
