"""What the page does when the service says no, starts again, or forgets; and whose answers it shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import ask, needs_chromium, opened, ready, violations
from tests.helpers.inside import serving
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import Keyed, weather

pytestmark = needs_chromium


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_refusal_is_told_and_not_asked_for_each_second(page: Any, status: int) -> None:
    asked: list[str] = []

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        told = {"error": {"type": "overloaded", "message": "come back later"}}
        route.fulfill(status=status, headers={"retry-after": "3600"}, json=told)

    page.clock.install()
    page.reload()
    ready(page)
    page.route("**/v1/cache/recent*", refuse)
    page.clock.run_for(2_100)
    page.get_by_role("alert").get_by_text("come back later").wait_for()
    for _ in range(20):
        page.clock.run_for(2_100)
        page.wait_for_timeout(20)
    assert len(asked) == 1
    assert page.locator("#health").get_attribute("data-state") == "ready"
    page.unroute("**/v1/cache/recent*")
    page.clock.fast_forward(3_600_000)
    page.get_by_role("alert").get_by_text("come back later").wait_for(state="hidden")
    page.complaints.clear()  # Chromium's console tells of the refusal


@pytest.mark.slow
def test_a_purge_takes_the_numbers_too(page: Any, empty: ServerProcess) -> None:
    ask(page, "What is a ship?")
    page.get_by_role("link", name="Live").click()
    page.get_by_role("img", name=re.compile(r"^1 answers")).wait_for()
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("button", name="Purge all of mine…").click()
    page.locator("#confirm-yes").click()
    page.get_by_text("Nothing is stored yet").wait_for()
    page.get_by_role("link", name="Live").click()
    page.get_by_text("No answers yet.").first.wait_for()
    ask_of = {"query": "And a boat?", "max_new_tokens": 2}
    httpx.post(f"{empty.url}/query", json=ask_of, timeout=DEADLINE).raise_for_status()
    page.get_by_role("img", name=re.compile(r"^1 answers")).wait_for()
    httpx.post(f"{empty.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()  # by another client
    page.get_by_text("No answers yet.").first.wait_for()


@pytest.mark.slow
def test_live_goes_on_after_a_restart(browser: Any, saved: Callable[..., Path], tmp_path: Path) -> None:
    model: dict[str, Any] = {"model": str(saved("llama"))}
    body = {"query": "What is a ship?", "max_new_tokens": 2}
    with serving(tmp_path, **model) as (url, _):
        for _ in range(3):
            httpx.post(f"{url}/query", json=body, timeout=DEADLINE).raise_for_status()
        page = opened(browser, f"{url}/#live")
        page.get_by_role("img", name=re.compile(r"^3 answers")).wait_for()
        page.context.set_offline(True)  # it does not see that the service is away
    with serving(tmp_path, **model, server__port=int(url.rpartition(":")[2])) as (again, _):
        assert again == url
        httpx.post(f"{url}/query", json=body, timeout=DEADLINE).raise_for_status()
        page.context.set_offline(False)
        page.get_by_role("img", name=re.compile(r"^1 answers")).wait_for()
        page.context.close()


@pytest.mark.slow
def test_several_models_are_told_apart(browser: Any, saved: Callable[..., Path], tmp_path: Path) -> None:
    models = {"small": str(saved("llama")), "other": str(saved("qwen2", seed=3))}
    with serving(tmp_path, models=models) as (url, _):
        for theme in ("light", "dark"):
            page = opened(browser, url, color_scheme=theme)
            ready(page)
            for name in models:
                page.get_by_role("combobox", name="Model").select_option(name)
                ask(page, "What is a ship? " * 9)
            assert violations(page) == [], theme
            page.get_by_role("link", name="Live").click()
            for table, rows in (("#alike-table", 2), ("#live-table", 2)):
                page.locator("details", has_text="The same as a table").evaluate("one => { one.open = true; }")
                page.locator(table).get_by_role("columnheader", name="Model").wait_for()
                shown = page.locator(table).locator("tbody tr").all_inner_texts()
                assert len(shown) >= rows
                assert {name for name in models if any(name in row for row in shown)} == set(models)
            assert violations(page) == [], theme
            page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_dialog_for_the_key_stays_and_axe_finds_nothing(browser: Any, keyed: Keyed, theme: str) -> None:
    page = opened(browser, keyed.url, color_scheme=theme)
    dialog = page.locator("#key-dialog")
    dialog.and_(page.locator("[open]")).wait_for()
    assert violations(page) == []
    for _ in range(4):  # without anything typed or clicked, Chromium lets Escape close what it likes
        page.keyboard.press("Escape")
    dialog.and_(page.locator("[open]")).wait_for()
    page.get_by_label("Key", exact=True).fill(keyed.acme)
    page.get_by_role("button", name="Use this key").click()
    ready(page)
    page.locator("#sets input").first.wait_for()
    assert not dialog.is_visible()
    page.context.close()


def test_another_tenants_key_begins_with_an_empty_page(browser: Any, keyed: Keyed) -> None:
    made = {"name": "ours", "tools": [weather(words=9)]}
    httpx.post(f"{keyed.url}/tools", json=made, headers={"x-api-key": keyed.acme}, timeout=DEADLINE).raise_for_status()
    page = opened(browser, keyed.url)
    page.get_by_label("Key", exact=True).fill(keyed.acme)
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("radio", name=re.compile("^ours ")).wait_for()
    ask(page, "What is our secret?")
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("treeitem", name=re.compile("^ours, ")).click()
    page.get_by_role("region", name="Text of this stretch").wait_for()
    page.evaluate("sessionStorage.setItem('keepwarm-key', 'kw-0-revoked')")
    page.get_by_label("Key", exact=True).fill(keyed.umbrella)
    with page.expect_navigation():
        page.get_by_role("button", name="Use this key").click()
    page.locator("#map-summary").get_by_text("stored run").wait_for()
    assert page.get_by_role("treeitem", name=re.compile("^ours, ")).count() == 0
    assert page.get_by_role("region", name="Text of this stretch").count() == 0
    page.get_by_role("link", name="Ask", exact=True).click()
    assert page.locator("#results").inner_text() == ""
    assert page.get_by_label("Question", exact=True).input_value() == ""
    httpx.delete(f"{keyed.url}/tools/ours", headers={"x-api-key": keyed.acme}, timeout=DEADLINE).raise_for_status()
    page.context.close()
