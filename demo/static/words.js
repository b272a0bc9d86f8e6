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
