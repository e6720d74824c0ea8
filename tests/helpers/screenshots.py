"""Pictures of the web page, of a real server with the embedded model.

python -m tests.helpers.screenshots --output docs/images
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tests.helpers.browser import launched, opened
from tests.helpers.processes import DEADLINE, ServerProcess

SAMPLES = Path(__file__).parents[2] / "src" / "keepwarm" / "serving" / "web" / "samples.json"

WORDS = "The desk is on the first floor, beside the stairs. It opens at nine, and closes at six. " * 6


def fill(url: str) -> None:
    """Some use: three sets, questions to each through two protocols, a set with a changed tool, a conversation."""
    with httpx.Client(base_url=url, timeout=DEADLINE) as http:
        samples = json.loads(SAMPLES.read_text())
        for sample in samples:
            http.post("/tools", json={name: sample[name] for name in ("name", "system", "tools")}).raise_for_status()
            for question in (sample["question"], "And at what price?", "Who are you?"):
                http.post("/query", json={"tools": sample["name"], "query": question, "max_new_tokens": 8})
        details = " ".join(f"Stop {n} is at a harbour with a fish market, and we stay {n} hours." for n in range(1, 9))
        trip: list[dict[str, Any]] = [{"role": "user", "content": f"This is our plan. {details} Is it sound?"}]
        ask = {"tools": "travel", "max_new_tokens": 8}
        http.post("/query", json=ask | {"messages": trip})
        for turn in ("Leave out the third stop. " * 24, "Add a night in Voss, and a table for five. " * 16):
            more = [*trip, {"role": "assistant", "content": "It is."}, {"role": "user", "content": turn}]
            http.post("/query", json=ask | {"messages": more})
        http.post("/query", json=ask | {"messages": [{"role": "user", "content": "Find rooms for all of us. " * 26}]})
        changed = copy.deepcopy(samples[0]["tools"])
        changed[-1]["description"] = "Translate a phrase or a menu, and say how it is pronounced."
        http.post("/tools", json={"name": "travel-2", "system": samples[0]["system"], "tools": changed})
        http.post("/query", json={"tools": "travel-2", "query": "What does 'spor' mean?", "max_new_tokens": 8})
        talk: list[dict[str, Any]] = [{"role": "system", "content": "You plan trips. Be brief. " * 40}]
        for text in ("Plan two days in Bergen.", "Make it cheaper.", "What shall I pack?"):
            talk.append({"role": "user", "content": text})
            body = {"messages": talk, "max_new_tokens": 32}
            answer = http.post("/query", json=body, headers={"x-session-id": "Bergen in May"}).json()["answer"]
            talk.append({"role": "assistant", "content": answer})
        chat = {"model": "demo", "max_tokens": 8, "messages": talk[:2]}
        http.post("/v1/chat/completions", json=chat)
        first = http.get("/v1/cache/entries").json()["entries"][0]["id"]
        http.post("/v1/cache/pin", json={"id": first, "ttl": 3600})


def take_first(browser: Any, url: str, folder: Path) -> None:
    """The page before anything is registered or stored."""
    page = opened(browser, f"{url}/#ask", color_scheme="light")
    page.get_by_role("button", name="Run: ask about a text").wait_for()
    page.screenshot(path=folder / "first-light.png")


def take(browser: Any, url: str, folder: Path) -> None:
    page = opened(browser, f"{url}/#ask", color_scheme="light")
    page.get_by_role("button", name="Hide").click()
    page.get_by_label("Question", exact=True).fill(WORDS.replace("nine", "eight", 1) + " When does the desk open?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".why h3").first.wait_for()
    page.get_by_label("Question", exact=True).fill(WORDS + " When does the desk open?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".edit").first.wait_for()
    page.locator("input[value=travel-2]").check()
    page.get_by_label("Question", exact=True).fill("Is there a train from Oslo to Bergen tomorrow morning?")
    page.get_by_role("button", name="Cold beside warm").click()
    page.get_by_text("faster to the first token").wait_for()
    page.set_viewport_size({"width": 1280, "height": 1290})
    page.screenshot(path=folder / "ask-light.png")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("treeitem").nth(2).click()
    page.get_by_role("region", name="Text of this stretch").wait_for()
    page.screenshot(path=folder / "cache-light.png")
    page.emulate_media(color_scheme="dark")
    page.get_by_role("link", name="Live").click()
    page.locator("#tokens-chart svg").wait_for()
    page.screenshot(path=folder / "live-dark.png")
    print("\n".join(page.complaints) or "the console is silent")


def take_phone(browser: Any, url: str, folder: Path) -> None:
    phone = opened(browser, f"{url}/#ask", viewport={"width": 390, "height": 844}, device_scale_factor=2)
    phone.get_by_role("button", name="Hide").click()
    phone.locator("input[value=home]").check()
    phone.get_by_label("Question", exact=True).fill("It is cold in the bath room.")
    phone.get_by_role("button", name="Cold beside warm").click()
    phone.get_by_text("faster to the first token").wait_for()
    phone.screenshot(path=folder / "ask-mobile.png", full_page=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of the web page.")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess("demo", Path(folder) / "store", "--log-format", "text").ready()
        try:
            with launched() as browser:
                take_first(browser, server.url, given.output)
                fill(server.url)
                take(browser, server.url, given.output)
                take_phone(browser, server.url, given.output)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
