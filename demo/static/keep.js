// What a visitor wrote survives when the page has to be loaded anew, because its server is another one now: in the
// entry of the browser's history, for that one load. Nothing is stored beyond it.

const FIELDS = "#prompt textarea, #settings :is(textarea, input)";
const readers = new Map();
const kept = history.state?.kvscope ?? {};
const { kvscope: _, ...others } = history.state ?? {};
if (history.state?.kvscope) history.replaceState(others, "");

/** Keep what `read` returns under `name`; what was kept there before this load, if anything. */
export function keep(name, read) {
  readers.set(name, read);
  return kept[name];
}

/** Load the page anew. */
export function renew() {
  const values = Object.fromEntries([...readers].map(([name, read]) => [name, read()]));
  try {
    history.replaceState({ ...history.state, kvscope: values }, "");
  } finally {
    location.reload();
  }
}

/** Write into a field as its visitor would. */
function fill(field, value) {
  if (field.type === "checkbox") return field.checked === value || field.click();
  if (field.value === value) return;
  const { set } = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value");
  set.call(field, value);
  field.dispatchEvent(new Event("input", { bubbles: true }));
  if (field.type === "number") field.dispatchEvent(new Event("blur"));
}

function fillFields(values) {
  const fields = [...document.querySelectorAll(FIELDS)];
  if (fields.length < values.length) return requestAnimationFrame(() => fillFields(values));
  fields.forEach((field, index) => fill(field, values[index]));
}

const values = keep("fields", () =>
  [...document.querySelectorAll(FIELDS)].map((field) => (field.type === "checkbox" ? field.checked : field.value)),
);
if (values) fillFields(values);
