"""Gradio's own parts (buttons, fields, sliders) in the page's colours, which style.css defines."""

import gradio as gr

from demo.panel import STATIC

FONT = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

# style.css redefines these variables under `.dark`, so one value serves both themes.
_VALUES = {
    "body_background_fill": "var(--page)",
    "body_text_color": "var(--ink)",
    "body_text_color_subdued": "var(--muted)",
    "background_fill_primary": "var(--card)",
    "background_fill_secondary": "var(--soft)",
    "border_color_primary": "var(--line)",
    "border_color_accent": "var(--you)",
    "color_accent": "var(--you)",
    "color_accent_soft": "var(--soft)",
    "block_background_fill": "transparent",
    "block_border_width": "0px",
    "block_shadow": "none",
    "block_label_background_fill": "transparent",
    "block_label_text_color": "var(--muted)",
    "block_title_text_color": "var(--muted)",
    "block_title_text_weight": "400",
    "block_info_text_color": "var(--muted)",
    "input_background_fill": "var(--card)",
    "input_border_color": "var(--line)",
    "input_border_color_focus": "var(--you)",
    "input_placeholder_color": "var(--muted)",
    "input_shadow": "none",
    "input_shadow_focus": "none",
    "slider_color": "var(--you)",
    "button_primary_background_fill": "var(--ink)",
    "button_primary_background_fill_hover": "var(--ink)",
    "button_primary_text_color": "var(--card)",
    "button_primary_text_color_hover": "var(--card)",
    "button_primary_border_color": "var(--ink)",
    "button_secondary_background_fill": "var(--card)",
    "button_secondary_background_fill_hover": "var(--soft)",
    "button_secondary_text_color": "var(--ink)",
    "button_secondary_text_color_hover": "var(--ink)",
    "button_secondary_border_color": "var(--line)",
    "button_primary_shadow": "none",
    "button_secondary_shadow": "none",
    "button_transition": "none",
}


def build_theme() -> gr.themes.Base:
    """The page's theme: system fonts only, so that no other host is asked for one."""
    theme = gr.themes.Base(font=FONT, font_mono=MONO, radius_size=gr.themes.sizes.radius_md)
    dark = {f"{name}_dark": value for name, value in _VALUES.items() if hasattr(theme, f"{name}_dark")}
    theme.set(**_VALUES, **dark)
    theme.custom_css = (STATIC / "style.css").read_text(encoding="utf-8")
    return theme
