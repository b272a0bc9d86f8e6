// At home in another site's frame: tell the host how tall the content is. It may follow, and nothing here depends on it.

/** Post `{ kvscope: "height", height }` in pixels to the page around, at first and whenever it changes. */
export function tellHeight() {
  const content = document.querySelector(".gradio-container main.contain");
  if (window.self === window.top || !content) return;
  let told = 0;
  new ResizeObserver(() => {
    const height = Math.ceil(content.getBoundingClientRect().height);
    if (height === told) return;
    told = height;
    window.parent.postMessage({ kvscope: "height", height }, "*");
  }).observe(content);
}
