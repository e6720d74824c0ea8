"""A real headless Chromium: the system's own (Debian's package `chromium`), driven by Playwright."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest

DEADLINE_MS = 60_000  # for machines that do much else


def chromium() -> str | None:
    """Path of the system's Chromium."""
    return next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    chromium() is None or importlib.util.find_spec("playwright") is None,
    reason="there is no Chromium (apt-get install chromium), or no playwright",
)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser, without a window."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=DEADLINE_MS)
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # its sandbox does not run as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--disable-gpu", *(["--no-sandbox"] if root else [])]
        )
        yield browser
        browser.close()


def opened(browser: Any, url: str, **options: Any) -> Any:
    """A page with a profile of its own. What its console says ill is in `page.complaints`, what it asks for in
    `page.asked`."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    page.complaints, page.asked = [], []
    page.on("console", lambda line: page.complaints.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(url)
    return page


def ready(page: Any) -> None:
    page.locator("#health[data-state=ready]").wait_for()
    page.locator("#sets input, #key-dialog[open]").first.wait_for(state="attached")


def ask(page: Any, question: str, tokens: int = 4) -> Any:
    """The card of the answer, once it is whole."""
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_role("button", name="Ask", exact=True).click()
    card = page.get_by_role("article", name="Answer").first
    card.get_by_role("region", name="Why it missed").wait_for()
    return card


def violations(page: Any) -> list[str]:
    """What axe finds against a screen reader's, a keyboard's or a weak eye's use of the page. Skips without it."""
    pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]]
