"""A hybrid behind the service: what the protocol and the page tell of its snapshots, and what a pin keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import needs_chromium, opened, ready
from tests.helpers.hybrids import SYSTEM, asked, hybrid
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.remote_archives import eventually

pytestmark = pytest.mark.slow

QUESTIONS = ("Which pier is the largest?", "And the smallest one?")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hybrid")
    hybrid().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    process = ServerProcess(folder / "model", folder / "store").ready()
    yield process
    assert process.stop() == 0


@pytest.fixture
def http(hybrids: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hybrids.url, timeout=DEADLINE) as client:
        client.post("/v1/cache/purge").raise_for_status()
        name = client.get("/v1/models").json()["data"][0]["id"]
        for question in QUESTIONS:
            chat(hybrids.url, "", messages=asked(question), model=name).raise_for_status()
        client.headers["x-model"] = name
        eventually(lambda: client.get("/v1/cache/tree").json()["snapshots"] >= 2)  # stored behind the answer
        yield client


def entries(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/cache/entries").raise_for_status().json()["entries"]
    return found


def test_entries_and_the_tree_tell_states_from_kv(http: httpx.Client) -> None:
    def both() -> list[dict[str, Any]]:
        return [http.get(f"/v1/cache/{name}").json() for name in ("entries", "tree")]

    seen: list[list[dict[str, Any]]] = []

    def steady() -> bool:  # the catalogue grows after what it lists
        seen.append(both())
        return bool(seen[-1][0]["bytes"] == seen[-1][1]["bytes"])

    eventually(steady)
    listed, tree = seen[-1]
    states = [one for one in listed["entries"] if one["kind"] == "snapshot"]
    assert (listed["snapshots"], listed["snapshot_bytes"]) == (len(states), sum(one["bytes"] for one in states))
    assert (tree["bytes"], tree["snapshots"], tree["snapshot_bytes"]) == (
        listed["bytes"],
        len(states),
        listed["snapshot_bytes"],
    )
    assert tree["runs"] == len(listed["entries"]) - len(states)
    marked = sorted(at for one in tree["stretches"] for at in one["snapshots"])
    assert marked == sorted(one["start"] + 1 for one in states)
    for one in tree["stretches"]:
        assert all(one["start"] < at <= one["start"] + one["tokens"] for at in one["snapshots"])
    full = http.get(f"/v1/cache/entries/{states[0]['id']}").raise_for_status().json()
    assert (full["kind"], full["tokens"]) == ("snapshot", 1)


def test_sizes_are_metrics(http: httpx.Client) -> None:
    for name in ("snapshots", "snapshot_bytes"):
        told = rf'keepwarm_store_{name}{{tier="disk"}} [1-9]'
        eventually(lambda told=told: re.search(told, http.get("/metrics").text))  # type: ignore[misc]


def test_a_breakpoint_keeps_the_snapshots_before_it(http: httpx.Client) -> None:
    body = {
        "model": http.headers["x-model"],
        "max_tokens": 2,
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": "Which one is new?"}],
    }
    http.post("/v1/messages", json=body).raise_for_status()
    eventually(lambda: {one["kind"] for one in entries(http) if one["pinned_until"]} == {"kv", "snapshot"})


def test_a_pin_by_id_keeps_them_and_a_removal_takes_them(http: httpx.Client) -> None:
    run = max((one for one in entries(http) if one["kind"] == "kv"), key=lambda one: one["tokens"])
    pinned = http.post("/v1/cache/pin", json={"id": run["id"], "ttl": 60}).raise_for_status().json()["runs"]
    states = [one for one in entries(http) if one["kind"] == "snapshot" and one["pinned_until"]]
    assert pinned > len(states) > 0
    http.delete(f"/v1/cache/entries/{run['id']}").raise_for_status()
    assert not {one["id"] for one in states} & {one["id"] for one in entries(http)}


@needs_chromium
def test_the_map_marks_where_computing_can_go_on(browser: Any, http: httpx.Client, hybrids: ServerProcess) -> None:
    page = opened(browser, hybrids.url)
    ready(page)
    page.get_by_role("link", name="Cache map").click()
    stretch = page.get_by_role("treeitem", name=re.compile("snapshots? of ")).first
    stretch.wait_for()
    assert page.locator("#map .snapshot").count() >= 2
    assert "of recurrent state (ticks)" in page.locator("#map-summary").inner_text()
    stretch.click()
    page.get_by_text(re.compile("^at [0-9,]+.*of recurrent state$")).wait_for()
    page.get_by_role("button", name="Purge…", exact=True).click()
    page.locator("#confirm-yes").click()
    page.locator("#map .snapshot").first.wait_for(state="detached")
    assert page.complaints == []
