"""What the browser tests do and look at, in a visitor's words."""

from playwright.sync_api import Locator, Page, expect

ANSWER = "#conversation article.assistant .text"
NOTE = "#conversation article.assistant footer > span:first-child"
# What the browser's console says where a server is away.
AWAY = r"Failed to load resource|ERR_|Failed to fetch|Connection|EventSource|network error|^Event$"
FIGURES = {
    "speed": '#speed-now [data-part="figure"]',
    "cache": '#cache-growth [data-part="figure"]',
    "batch": '#batch-timeline [data-part="figure"]',
    "race": '#race [data-part="figure"]',
}


def prompt_field(page: Page) -> Locator:
    return page.locator("#prompt textarea")


def ask(page: Page, text: str, new_tokens: int | None = None) -> None:
    """Send a prompt by the keyboard, and wait for the first text of its answer."""
    if new_tokens:
        set_new_tokens(page, new_tokens)
    answers = page.locator(ANSWER)
    before = answers.count()
    prompt_field(page).fill(text)
    prompt_field(page).press("Enter")
    expect(answers.nth(before)).not_to_be_empty()


def set_new_tokens(page: Page, count: int) -> None:
    page.get_by_role("button", name="Settings").click()
    number = page.locator("#settings").get_by_label("number input for Most new tokens")
    number.fill(str(count))
    number.press("Tab")
    page.get_by_role("button", name="Settings").click()


def wait_until_answered(page: Page) -> str:
    """Wait for the end of the answer; the line under it."""
    expect(page.locator("html[data-answering]")).to_have_count(0)
    return page.locator(NOTE).last.inner_text()


def wait_for_growth(page: Page, selector: str) -> None:
    """Wait until the element's text is longer than it is now."""
    length = page.locator(selector).last.evaluate("node => node.textContent.length")
    page.wait_for_function(
        "([selector, length]) => [...document.querySelectorAll(selector)].at(-1).textContent.length > length",
        arg=[selector, length],
    )


def count_updates(page: Page, figure: str) -> None:
    """Count the drawings of a figure from now on, in `window.updates`."""
    page.locator(figure).evaluate(
        "node => { window.updates = 0; node.on('plotly_afterplot', () => { window.updates += 1; }); }"
    )


def watch_frames(page: Page, expression: str) -> None:
    """Evaluate `expression` in every frame from now on; each distinct value once, in `window.seen`."""
    page.evaluate(
        """(expression) => {
            const look = new Function(`return JSON.stringify(${expression});`);
            window.seen = [];
            const frame = () => {
                const value = look();
                if (!window.seen.includes(value)) window.seen.push(value);
                requestAnimationFrame(frame);
            };
            frame();
        }""",
        expression,
    )
