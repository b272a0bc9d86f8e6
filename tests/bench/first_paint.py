"""How soon a visitor sees something: the first paint, and the first numbers of everybody, of a page newly opened.

    python tests/bench/first_paint.py [--rounds 5]

The real app with the embedded model, Debian's Chromium without a cache, one page at a time; medians in seconds.
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from playwright.sync_api import Browser, sync_playwright
from running_app import running_app

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
NUMBERS = "!['', 'connecting'].includes(document.querySelector('#header [data-part=\"model\"]')?.textContent ?? '')"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"


def open_page(browser: Browser, url: str) -> dict[str, float]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(url, wait_until="commit")
    page.wait_for_function(NUMBERS)
    seconds = {"numbers": page.evaluate("performance.now() / 1000"), "paint": page.evaluate(PAINT)}
    context.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with running_app(None) as app, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        open_page(browser, app.url)
        rounds = [open_page(browser, app.url) for _ in range(arguments.rounds)]
        browser.close()
    medians = {what: statistics.median(seconds[what] for seconds in rounds) for what in ("paint", "numbers")}
    print(f"first paint {medians['paint']:.2f} s, first numbers {medians['numbers']:.2f} s")
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
