// A Plotly figure in a node of its own: drawn when it can be seen, updated in place, in the theme's colours.

import { you } from "./live.js";

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, scrollZoom: false };
const DESCRIBE_EVERY_MS = 5000;
const coarse = matchMedia("(pointer: coarse)");
let plotly = null;

function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("plotly.min.js", import.meta.url);
    script.onload = () => resolve(window.Plotly);
    script.onerror = reject;
    document.head.append(script);
  });
  return plotly;
}

/** A copy of `value` with `var(--name)` replaced by the colour it has in the current theme. */
function resolveColors(value, style) {
  if (typeof value === "string") {
    const name = /^var\((--[\w-]+)\)$/.exec(value);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((item) => resolveColors(item, style));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolveColors(item, style)]));
  }
  return value;
}

const asYou = (value) => JSON.parse(JSON.stringify(value).replaceAll(/--stranger-\d/g, "--you"));

/** Paint what belongs to this page's client in the colour that means "you". */
function markYours(trace) {
  if (you.client === null) return trace;
  if (trace.meta?.client === you.client) return asYou(trace);
  if (!trace.customdata) return trace;
  const mine = trace.customdata.map(([client]) => client === you.client);
  const repaint = (colors) => colors.map((color, bar) => (mine[bar] ? asYou(color) : color));
  const marker = { ...trace.marker };
  if (Array.isArray(marker.color)) marker.color = repaint(marker.color);
  if (Array.isArray(marker.line?.color)) marker.line = { ...marker.line, color: repaint(marker.line.color) };
  if (Array.isArray(marker.pattern?.fgcolor)) {
    marker.pattern = { ...marker.pattern, fgcolor: repaint(marker.pattern.fgcolor) };
  }
  return { ...trace, marker };
}

export class Figure {
  constructor(node) {
    this.node = node;
    this.figure = null;
    this.pressed = null;
    this.described = -DESCRIBE_EVERY_MS;
    this.zoom = {}; // the ranges that a visitor chose; a double click gives the axes back to the data
    new ResizeObserver(() => this.draw()).observe(node);
    new MutationObserver(() => this.draw()).observe(document.body, { attributeFilter: ["class"] });
  }

  update(figure) {
    this.figure = figure;
    this.node.parentElement.toggleAttribute("data-empty", !figure);
    return this.draw();
  }

  /** Call `pressed` with the point that somebody presses. */
  onPress(pressed) {
    this.pressed = pressed;
  }

  async draw() {
    if (!this.figure || !this.node.clientWidth) return;
    const Plotly = await loadPlotly();
    if (!this.figure) return; // emptied while the library was on its way
    if (this.node._dragging) return; // a redraw would break off the zoom; the next update draws
    const style = getComputedStyle(this.node);
    const data = resolveColors(this.figure.data.map(markYours), style);
    const layout = resolveColors(this.figure.layout, style);
    layout.font = { ...layout.font, family: style.fontFamily };
    layout.dragmode = coarse.matches ? false : "zoom";
    for (const [axis, range] of Object.entries(this.zoom)) layout[axis] = { ...layout[axis], range };
    const first = !this.node.on;
    await Plotly.react(this.node, data, layout, CONFIG);
    this.describe();
    if (!first) return;
    this.rememberZoom();
    this.node.on("plotly_click", ({ points }) => this.pressed?.(points[0]));
  }

  /** For those who do not see it: what its card says of it in numbers. */
  describe() {
    if (performance.now() - this.described < DESCRIBE_EVERY_MS) return;
    this.described = performance.now();
    this.node.setAttribute("role", "img");
    const card = this.node.closest("#speed-now, #cache-growth, #batch-timeline, #race");
    const texts = [...(card?.querySelectorAll("h2, header [data-part=caption], .explanation, .formula") ?? [])];
    const own = texts.filter((node) => node.closest("details") === this.node.closest("details"));
    const said = own.map((node) => node.textContent.trim().replace(/\.$/, "")).filter(Boolean);
    this.node.setAttribute("aria-label", said.join(". "));
  }

  // Not `uirevision`: it drops a zoom as soon as the data outgrow the axis.
  rememberZoom() {
    this.node.on("plotly_relayout", (change) => {
      for (const axis of ["xaxis", "yaxis"]) {
        const from = change[`${axis}.range[0]`], to = change[`${axis}.range[1]`];
        if (from !== undefined && to !== undefined) this.zoom[axis] = [from, to];
      }
    });
    this.node.on("plotly_doubleclick", () => {
      this.zoom = {};
      this.draw();
    });
  }
}
