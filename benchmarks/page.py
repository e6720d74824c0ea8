"""How soon the web page is there, in a real Chromium on the same machine.

    python benchmarks/page.py [--model demo] [--rounds 9] [--out FILE]

Starts `keepwarm serve` and a headless Chromium, opens the page a few times, and then `--rounds` times in a tab of its
own each. Files are in the browser's cache then. Prints one line
of JSON per measurement, in milliseconds from the start of the navigation:

* `first_paint`: something of the page is drawn (Chromium's own first contentful paint).
* `interactive`: the first view is drawn, and every control has its listeners. The page shows a view last, after it has
  set up everything.
* `filled`: the service's state and the sets of tools, which the page asks for, are in the document.

The machine's load stands in each line: on a busy one the figures tell little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.browser import DEADLINE_MS, launched
from tests.helpers.processes import ServerProcess

WARM_UP = 3
# Watches from before the document exists. What is due after a frame has been drawn runs in a task behind it.
WATCH = """
window.seen = {};
const drawn = (name) => requestAnimationFrame(() => setTimeout(() => { window.seen[name] ??= performance.now(); }));
new MutationObserver(() => {
    const view = document.querySelector(".view:not([hidden])");
    if (view && document.querySelector("nav a[aria-current]") && !window.seen.begun) {
        window.seen.begun = true;
        drawn("interactive");
    }
    if (document.querySelector("#health[data-state=ready]") && document.querySelector("#sets input")) drawn("filled");
}).observe(document, {subtree: true, childList: true, attributes: true});
"""
TAKEN = """async () => {
    const paint = () => performance.getEntriesByName("first-contentful-paint")[0];
    while (!window.seen.filled || !paint()) await new Promise((soon) => setTimeout(soon, 20));
    return {first_paint: paint().startTime, interactive: window.seen.interactive, filled: window.seen.filled};
}"""


def opened(context: Any, url: str) -> dict[str, float]:
    """The times of one visit, in a tab of its own."""
    page = context.new_page()
    page.goto(url)
    times: dict[str, float] = page.evaluate(TAKEN)
    page.close()
    return times


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    found = {"median": middle, "quartile_1": low, "quartile_3": high, "worst": max(values)}
    return {name: round(value, 1) for name, value in found.items()}


def measured(model: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(model, Path(folder) / "store").ready()
        try:
            with launched() as browser:
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                context.set_default_timeout(DEADLINE_MS)
                context.add_init_script(WATCH)
                for _ in range(WARM_UP):
                    opened(context, server.url)
                before = os.getloadavg()[0]
                visits = [opened(context, server.url) for _ in range(rounds)]
                load = [round(before, 2), round(os.getloadavg()[0], 2)]
                about = {"benchmark": "page", "chromium": browser.version, "rounds": rounds, "load": load}
        finally:
            server.stop()
    return [about | {"part": name} | spread([visit[name] for visit in visits]) for name in visits[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon the web page is there.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a file to append the lines to")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds: at least 2 for quartiles, got {given.rounds}")
    lines = [json.dumps(row) for row in measured(given.model, given.rounds)]
    print("\n".join(lines))
    if given.out is not None:
        with given.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
