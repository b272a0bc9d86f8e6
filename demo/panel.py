"""One card of the page: constant markup that a script of the same name keeps up to date."""

from pathlib import Path
from typing import Any

import gradio as gr

STATIC = Path(__file__).parent / "static"

# The markup never depends on the value. Gradio therefore leaves the nodes alone when a value arrives
# (figures keep their zoom), and no text of a visitor or a model passes through its template
# language, which would run `${...}` as script. In Gradio's web component the address of the page is
# somebody else's.
_ON_LOAD = """
const page = document.querySelector('gradio-app[src]')?.getAttribute('src') ?? document.baseURI;
import(new URL('kvscope/%s.js', page)).then(
  (panel) => panel.mount({ element, props, watch, trigger, events: [%s] }));
"""


def panel(name: str, *, elem_id: str, value: Any = None, events: tuple[str, ...] = ()) -> gr.HTML:
    """`static/NAME.html`, brought to life by `mount` in `static/NAME.js`."""
    return gr.HTML(
        value,
        html_template=(STATIC / f"{name}.html").read_text(encoding="utf-8"),
        js_on_load=_ON_LOAD % (name, ", ".join(f"'{event}'" for event in events)),
        elem_id=elem_id,
        apply_default_css=False,
    )
