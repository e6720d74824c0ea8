"""The cache map: what its colours tell apart, and that it leaves alone what did not change."""

from __future__ import annotations

import re
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import ask, needs_chromium, opened
from tests.helpers.processes import DEADLINE, ServerProcess

pytestmark = needs_chromium

DESK = "The desk opens at nine and closes at six. " * 9

BARS = """() => {
    const track = document.createElement("div");
    track.style.position = "relative";
    track.style.height = "20px";
    document.querySelector("#view-cache").append(track);
    const read = (kind, age) => {
        const bar = document.createElement("span");
        bar.className = `stretch ${kind}`;
        bar.dataset.age = age;
        track.append(bar);
        const style = getComputedStyle(bar);
        return {colour: style.backgroundColor, height: bar.getBoundingClientRect().height};
    };
    const grounds = ["--card", "--page", "--accent-wash"].map((name) => {
        track.style.background = `var(${name})`;
        return getComputedStyle(track).backgroundColor;
    });
    const ages = [0, 1, 2, 3, 4];
    return {ram: ages.map((age) => read("ram", age)), disk: ages.map((age) => read("disk", age)), grounds};
}"""
# How people see who lack one kind of cones (Machado, Oliveira and Fernandes, 2009), in linear light.
EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def linear(colour: str) -> list[float]:
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]


def contrast(one: str, other: str) -> float:
    """As WCAG has it."""
    dark, light = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (linear(one), linear(other))
    )
    return (light + 0.05) / (dark + 0.05)


def apart(one: str, other: str, eyes: str) -> float:
    """Distance in CIELAB: 10 is told apart at a glance."""

    def lab(colour: str) -> tuple[float, float, float]:
        red, green, blue = (
            min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True)))) for row in EYES[eyes]
        )
        x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
        y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0888
        fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
        return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)

    return float(sum((a - b) ** 2 for a, b in zip(lab(one), lab(other), strict=True)) ** 0.5)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tiers_differ_by_colour_and_ages_by_thickness(browser: Any, empty: ServerProcess, theme: str) -> None:
    page = opened(browser, f"{empty.url}/#cache", color_scheme=theme)
    found = page.evaluate(BARS)
    page.context.close()
    (ram,), (disk,) = ({bar["colour"] for bar in found[tier]} for tier in ("ram", "disk"))  # whatever their age
    assert {eyes: apart(ram, disk, eyes) > 40 for eyes in EYES} == dict.fromkeys(EYES, True)
    assert min(contrast(bar, ground) for bar in (ram, disk) for ground in found["grounds"]) >= 3
    for tier in ("ram", "disk"):
        heights = [bar["height"] for bar in found[tier]]
        assert heights == sorted(heights, reverse=True)
        assert len(set(heights)) == 5


@pytest.fixture
def two(page: Any) -> Any:
    """The map of two prompts that begin alike, with a clock that tests move."""
    for word in ("first", "last"):
        ask(page, f"{DESK} Which ship was {word}?")
    page.clock.install()
    page.reload()
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("treeitem").nth(2).wait_for()
    return page


def later(page: Any, seconds: float) -> None:
    """Let the service's clock be so much later for the page, until the map was asked for again."""

    def aged(route: Any) -> None:
        answer = route.fetch()
        told = answer.json()
        route.fulfill(response=answer, json=told | {"now": told["now"] + seconds})

    page.route("**/v1/cache/tree", aged)
    with page.expect_response("**/v1/cache/tree"):
        page.clock.fast_forward(2_000)
        for _ in range(5):
            page.clock.run_for(2_100)
            page.wait_for_timeout(200)


def test_only_ages_change_when_nothing_else_does(two: Any) -> None:
    two.evaluate(
        """() => { window.rows = [...document.querySelectorAll(".run")]; window.changed = [];
        rows[1].focus();
        const watch = new MutationObserver((all) => window.changed.push(...all.map((one) => one.target.className)));
        watch.observe(document.querySelector("#map"), {subtree: true, childList: true, attributes: true}); }"""
    )
    before = two.evaluate("document.activeElement.textContent")
    later(two, 7200)
    two.locator(".run .since", has_text="2 h").nth(2).wait_for()
    assert two.evaluate("[...document.querySelectorAll('.run')].every((row, i) => row === window.rows[i])")
    assert two.evaluate("document.activeElement === window.rows[1]")
    assert two.evaluate("document.activeElement.querySelector('.unseen').textContent") in before  # nothing to read anew
    assert "used 2 h ago" in two.evaluate("window.rows[0].title")
    assert "run-name" not in two.evaluate("window.changed")


def test_a_row_that_changed_keeps_its_place_and_the_focus(two: Any, empty: ServerProcess) -> None:
    two.evaluate("() => { window.rows = [...document.querySelectorAll('.run')]; window.rows[0].focus(); }")
    run = httpx.get(f"{empty.url}/v1/cache/tree", timeout=DEADLINE).json()["stretches"][0]["run"]
    httpx.post(f"{empty.url}/v1/cache/pin", json={"id": run, "ttl": 60}, timeout=DEADLINE).raise_for_status()
    later(two, 0)
    two.get_by_role("treeitem", name=re.compile("pinned")).first.wait_for()
    assert two.evaluate("document.activeElement === window.rows[0]")


def test_a_stretch_that_left_the_store_is_told_and_its_row_goes(two: Any, empty: ServerProcess) -> None:
    httpx.post(f"{empty.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()
    two.get_by_role("treeitem").first.click()
    two.get_by_text("has left the store meanwhile").wait_for()
    two.get_by_text("Nothing is stored yet").wait_for()
    assert two.complaints == []
