"""Numbers of README.md and the manual: each comes from a result, or is told apart. Plots are those of results."""

from __future__ import annotations

import re
from statistics import median
from xml.etree import ElementTree

import pytest
from benchmarks.plan import RESULTS, STEPS

from tools.figures import pages, pictures, sources
from tools.figures.charts import bars, lines
from tools.figures.results import ROOT, over, records, run_of, sooner

NAMES = [name for step in STEPS for name in step.files]


@pytest.mark.parametrize("page", pages.pages())
def test_numbers_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert pages.fill(text) == text, "`make figures` fills them in"
    assert pages.wrong(page, text) == [], "a measured number stands in a block; see tools/figures/not_measured.toml"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_plots_are_those_of_the_results(name: str) -> None:
    drawn = (ROOT / pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == pictures.PICTURES[name](), "`make figures` draws it"
    ElementTree.fromstring(drawn)


def test_every_plot_stands_in_a_page_and_so_does_every_block() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages.pages()]
    shown = {name for text in texts for name in re.findall(r"images/([\w-]+)\.svg", text)}
    assert shown == set(pictures.PICTURES)
    assert {name for text in texts for name in pages.used(text)} == set(pages.BLOCKS)


def test_a_number_that_no_result_holds_is_found() -> None:
    text = "It is 7 times faster.\n<!-- figures: reasons -->\n- after 26 ms\n<!-- end -->\n`4 ms` [x](5%20s)"
    assert pages.loose(text) == ["7 times"]
    assert pages.wrong("README.md", text) == ["7 times comes from no result"]
    assert pages.fill(text) != text


def test_a_number_that_is_allowed_must_be_there() -> None:
    assert "10 % is allowed, and not there" in pages.wrong("docs/gguf.md", "Nothing.")
    assert pages.wrong("docs/models.md", "Nothing.")


def test_only_pages_that_are_there_have_numbers_that_nobody_measured() -> None:
    import tomllib

    named = tomllib.loads(pages.NOT_MEASURED.read_text(encoding="utf-8"))
    assert set(named) <= set(pages.pages())
    assert all(reason for numbers in named.values() for reason in numbers.values())


# ---- results ----


def test_the_folder_holds_what_a_step_makes_and_nothing_else() -> None:
    found = {path.name for path in RESULTS.iterdir() if not path.name.startswith(".")}
    assert found == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_tells_its_run_in_its_first_line(name: str) -> None:
    commit, when, machine = sources.told(name)
    assert re.match(r"`[0-9a-f]{10}`$", commit), "code that was not committed"
    assert re.match(r"\d{4}-\d\d-\d\d", when)
    assert "cores" in machine
    assert not run_of(name).get("quick")
    assert records(name)
    assert all("commit" not in each.get("run", {}) for each in records(name))


def test_ratios_come_with_quartiles_and_the_worst() -> None:
    ratios = [1.0, 1.2, 1.1, 1.4, 1.3]
    assert over(ratios) == "1.20 (1.10 to 1.30; 1.40)"
    assert sooner([10 * each for each in ratios]) == "12.0 (11.0 to 13.0; 10.0)"
    assert over([2.5]) == "2.50"
    assert median(ratios) == 1.2


# ---- charts ----


def test_bars_are_as_long_as_their_values() -> None:
    drawn = bars("A & B", [("one", 1.0, "red"), ("four", 4.0, "blue")], "{:.0f}".format)
    ElementTree.fromstring(drawn)
    short, long = (float(width) for width in re.findall(r'width="([\d.]+)" height="28"', drawn))
    assert long == 4 * short


def test_lines_go_through_their_points_also_over_powers_of_ten() -> None:
    drawn = lines("T", "x", "y", {"a": [(1, 1), (10, 10), (100, 100)]}, log_x=True, log_y=True)
    ElementTree.fromstring(drawn)
    (points,) = re.findall(r'points="([^"]+)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = ((float(n) for n in each.split(",")) for each in points.split())
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.11)
    assert 70 <= x0 < x2 <= 500
    assert 50 <= y2 < y0 <= 300
