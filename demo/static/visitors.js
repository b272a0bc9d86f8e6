// What became of the visitors that this page has brought.

import { wake, you } from "./live.js";
import { parts, sayLinked } from "./words.js";

export function mount({ element, props, watch }) {
  const part = parts(element);
  const show = () => {
    const { said, client } = props.value;
    if (client) {
      you.client = client;
      wake();
    }
    sayLinked(part.said, said);
  };
  watch("value", show);
  show();
}
