"""The page: what stands where, and which event calls what."""

import json
from pathlib import Path
from typing import Any

import gradio as gr

from demo.api import Page, add_api
from demo.chat import Chat, Visit
from demo.forum import QUESTION, Forum
from demo.forum import shown as forum_value
from demo.lease import price
from demo.panel import panel
from demo.prompts import EXAMPLE_QUESTION, EXAMPLE_SCHEMA, STARTERS, SYSTEM_PROMPT, race_prompts
from demo.quota import Quotas
from demo.race import CHOICES, COLD, FASTEST_FIRST, FIELDS, SLOWEST_FIRST, TOKENS, WARM, Race
from demo.race_figures import TITLES
from demo.settings import PageSettings
from demo.streams import Streams
from demo.tokens import Answers
from demo.visitors import MOST_TOKENS, Visitors
from engine import Engine

MOST_PROMPT_CHARACTERS = 4000
HEAD = Path(__file__).parent / "static" / "head.html"

# Handlers are async: a crowd that comes or leaves at once would need a thread for each of the others.
# Nobody waits in Gradio's line, no veil covers what is being updated, and the API page lists only the API.
_EVENT: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}

_CHOICE: dict[str, Any] = {"container": False, "elem_classes": "choice"}
_RACE_HEADER = '<header><h2>Race</h2><p data-part="caption">for those who do not believe it</p></header>'
_SCHEMA_HINT = (
    "The answer is then forced to fit: nothing else can be said. One that reaches the most new tokens first is only "
    "the beginning. Empty: off."
)
_TOGGLE_SETTINGS = "() => { document.documentElement.toggleAttribute('data-settings'); }"
_MARK_JSON = "(schema) => { document.documentElement.toggleAttribute('data-json', Boolean(schema.trim())); }"
_USE_EXAMPLE = (
    f"(schema, prompt) => [{json.dumps(EXAMPLE_SCHEMA)}, prompt.trim() ? prompt : {json.dumps(EXAMPLE_QUESTION)}]"
)


def build_page(engine: Engine, visitors: Visitors, answers: Answers, settings: PageSettings, quotas: Quotas) -> Page:
    """The whole page, with its events and its API, ready to be launched."""
    page = Page(settings.max_streams, title="KVScope", analytics_enabled=False, fill_width=True)
    streams = Streams(settings, page.calls.reader_is_behind)
    with page:
        panel("header", elem_id="header")
        with gr.Row(elem_id="columns", equal_height=True):
            with gr.Column(elem_id="chat"):
                speed_outputs = _chat_column(page, Chat(engine, streams, answers))
            with gr.Column(elem_id="side"):
                panel("tabs", elem_id="tabs")
                speed_outputs(panel("speed", elem_id="speed-now"))
                panel("cache", elem_id="cache-growth")
                _batch_card(visitors, price(engine, quotas, owed=MOST_TOKENS, to_read=visitors.a_press))
                race = Race(engine, streams, race_prompts(engine.config.max_race_tokens), quotas)
                _race_card(page, race, Forum(engine, streams), price(engine, quotas, lanes=2))
        panel("footer", elem_id="footer")
        page.unload(visitors.leave)
        page.fns[max(page.fns)].api_visibility = "private"  # `unload` takes no options
        add_api(engine, streams, quotas)
    page.queue(max_size=settings.max_streams, api_open=False)
    page._queue = page.calls
    return page


def _chat_column(page: gr.Blocks, chat: Chat):
    """Chat, prompt and settings; returns what connects them once the speed panel exists."""
    visit = gr.State(Visit(), delete_callback=Visit.stop)
    conversation = panel("conversation", elem_id="conversation", events=("retry", "edit"))
    with gr.Column(elem_id="settings"):
        settings, example = _settings_fields()
    with gr.Row(elem_id="composer"):
        prompt = gr.Textbox(
            elem_id="prompt",
            label="Your question",
            placeholder="Ask something…",
            show_label=False,
            container=False,
            max_lines=6,
            scale=1,
        )
        stop = gr.Button("Stop", elem_id="stop", scale=0, min_width=0)
        send = gr.Button("Send", elem_id="send", variant="primary", scale=0, min_width=0)
    with gr.Row(elem_id="chips"):
        chips = [
            (gr.Button(label, scale=0, min_width=0, elem_classes="starter"), text) for label, text in STARTERS.items()
        ]
        new = gr.Button("New chat", elem_id="new-chat", scale=0, min_width=0)
        gr.Button("Settings", elem_classes="open-settings", scale=0, min_width=0).click(None, js=_TOGGLE_SETTINGS)
        panel("tour", elem_id="tour")
    page.load(prompt_from_address, None, prompt, **_EVENT)
    schema = settings[-1]
    schema.change(None, schema, js=_MARK_JSON, api_visibility="private")
    example.click(None, [schema, prompt], [schema, prompt], js=_USE_EXAMPLE, api_visibility="private")

    def connect(speed: gr.HTML) -> None:
        outputs = [conversation, prompt, speed]
        gr.on([send.click, prompt.submit], chat.send, [prompt, conversation, visit, *settings], outputs, **_EVENT)
        for chip, text in chips:
            chip.click(chat.send, [gr.State(text), conversation, visit, *settings], outputs, **_EVENT)
        conversation.retry(chat.retry, [conversation, visit, *settings], outputs, **_EVENT)
        conversation.edit(chat.edit, conversation, [conversation, prompt], **_EVENT)
        stop.click(chat.stop, visit, None, **_EVENT)
        new.click(chat.new, visit, outputs, **_EVENT)

    return connect


async def prompt_from_address(request: gr.Request) -> Any:
    """What the page's address wants asked; it is sent by the visitor, not by the page."""
    return request.query_params.get("prompt", "")[:MOST_PROMPT_CHARACTERS] or gr.skip()


def _settings_fields() -> tuple[list[Any], gr.Button]:
    """The system prompt, then `SETTINGS` in their order; and the button that fills in the example of a schema."""
    system = gr.Textbox(SYSTEM_PROMPT, label="System prompt", lines=2, max_lines=4)
    with gr.Row():
        most = gr.Slider(1, 1024, 256, step=1, label="Most new tokens")
        temperature = gr.Slider(0, 2, 0.7, step=0.05, label="Temperature (0: always the likeliest)")
    with gr.Row():
        top_p = gr.Slider(0.05, 1, 0.95, step=0.05, label="Top-p (1: off)")
        top_k = gr.Slider(0, 200, 50, step=1, label="Top-k (0: off)")
        typical_p = gr.Slider(0.05, 1, 1, step=0.05, label="Typical-p (1: off)")
    with gr.Row():
        repetition = gr.Slider(0.5, 2, 1.1, step=0.05, label="Repetition penalty (1: off)")
        frequency = gr.Slider(-2, 2, 0, step=0.1, label="Frequency penalty (0: off)")
    with gr.Row():
        seed = gr.Textbox("", label="Seed (empty: a new one each time)", max_lines=1)
        stop = gr.Textbox("", label="Stop strings, one a line", max_lines=3)
    watermark = gr.Checkbox(
        False, label="Watermark (one quarter of the vocabulary is preferred, by which a detector knows the text)"
    )
    with gr.Column(elem_id="schema"):
        schema = gr.Textbox("", label="Answer as JSON (schema)", lines=3, max_lines=14, elem_id="schema-text")
        with gr.Row():
            example = gr.Button("Use the example", scale=0, min_width=0)
            gr.HTML(_SCHEMA_HINT, elem_id="schema-hint")
    fields = [most, temperature, top_p, top_k, typical_p, repetition, frequency, seed, stop, watermark, schema]
    return [system, *fields], example


def _batch_card(visitors: Visitors, cost: str) -> None:
    with gr.Column(elem_id="batch-timeline"):
        panel("batch", elem_id="batch")
        with gr.Row(elem_classes="actions"):
            bring = gr.Button(f"Bring {visitors.a_press} visitors", elem_id="visitors", scale=0, min_width=0)
            said = panel("visitors", elem_id="visitors-said", value={"said": cost})
    bring.click(visitors.bring, None, said, **_EVENT)


def _race_card(page: gr.Blocks, race: Race, forum: Forum, cost: str) -> None:
    """The race and its fields, which the page's address may fill."""
    with gr.Column(elem_id="race"):
        gr.HTML(html_template=_RACE_HEADER, apply_default_css=False)
        with gr.Row(elem_classes="actions"):
            start = gr.Button("Start the race", elem_id="race-start", variant="primary", scale=0, min_width=0)
            stop = gr.Button("Stop", elem_id="race-stop", scale=0, min_width=0)
            prompts = list(race.prompts)
            prompt = gr.Radio(prompts, value=prompts[0], label="Prompt", **_CHOICE)
            tokens = gr.Radio(TOKENS, value=FIELDS["race_tokens"], label="Tokens", **_CHOICE)
        with gr.Accordion("Lanes and conditions", open=False, elem_id="race-options"):
            titles = [(title, name) for name, title in TITLES.items()]
            lanes = gr.CheckboxGroup(titles, value=FIELDS["race_lanes"], label="Lanes", **_CHOICE)
            with gr.Row(elem_classes="actions"):
                choice = gr.Radio(list(CHOICES), value=FIELDS["race_choice"], label="Choice of tokens", **_CHOICE)
                orders = [(order, order) for order in (SLOWEST_FIRST, FASTEST_FIRST)]
                orders += [(f"{title} first", name) for title, name in titles]
                first = gr.Dropdown(
                    orders,
                    value=FIELDS["race_first"],
                    label="Who steps first",
                    filterable=False,
                    container=False,
                    scale=0,
                    min_width=200,
                    elem_id="race-first",
                )
                warm = gr.Radio([WARM, COLD], value=FIELDS["race_start"], label="Start", **_CHOICE)
        if cost:
            gr.HTML(f'<p class="quiet">{cost}</p>', elem_id="race-cost")
        shown = panel("race", elem_id="race-lanes", value=race.idle(FIELDS["race_lanes"]))
        with gr.Row(elem_id="forum", elem_classes="actions"):
            ask = gr.Button("Run the forum's experiment", elem_id="forum-start", scale=0, min_width=0)
            answer = panel("forum", elem_id="forum-answer", value=forum_value(QUESTION))
    fields = [prompt, tokens, lanes, choice, first, warm]
    start.click(race.start, fields, shown, **_EVENT)
    stop.click(race.stop, None, None, **_EVENT)
    ask.click(forum.run, None, answer, **_EVENT)
    page.load(race.preset, None, [*fields, shown], **_EVENT)
