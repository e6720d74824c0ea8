"""The decision records: each is in the index, and records that replace or add to each other are linked both ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "decisions"
ROW = re.compile(r"^\| \[(\d{4})\]\((.+?\.md)\) \| (.+?) \| (.+?) \| (\d{4}-\d{2}-\d{2}) \|$", re.MULTILINE)


class Record(NamedTuple):
    file: str
    title: str
    status: str
    linked: set[int]


def linked_in(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\]\((\d{4})-[^)]*\.md\)", text)}


def all_records() -> dict[int, Record]:
    found = {}
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        heading, *lines = path.read_text().splitlines()
        status = next(line for line in lines if line.startswith("Status: "))
        number, title = heading.removeprefix("# ").split(". ", 1)
        assert path.name.startswith(f"{int(number):04}-")
        found[int(number)] = Record(path.name, title, status, linked_in(status))
    return found


def test_the_index_has_every_record_once_with_its_title_its_status_and_a_date() -> None:
    records = all_records()
    rows = ROW.findall((FOLDER / "README.md").read_text())
    assert sorted(int(number) for number, *_ in rows) == sorted(records)
    for number, file, title, status, _ in rows:
        record = records[int(number)]
        assert (file, title) == (record.file, record.title)
        assert status.split(";")[0] == re.split("[;.]", record.status.removeprefix("Status: "))[0]
        later = {each for each in record.linked if each > int(number)}
        assert linked_in(status) == later, f"the index says something else of record {number} than its Status line"


def test_records_are_linked_both_ways() -> None:
    records = all_records()
    one_way = [(a, b) for a, record in records.items() for b in record.linked if a not in records[b].linked]
    assert not one_way, "the first of each pair names the second in its Status line, and not the other way round"


def test_a_status_line_names_records_by_links() -> None:
    for record in all_records().values():
        without_links = re.sub(r"\[[^]]*\]\([^)]*\)", "", record.status)
        assert not re.search(r"records? \d", without_links), record.file


def test_links_of_records_lead_to_files() -> None:
    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (FOLDER / target).exists(), f"{path.name} links to {target}"
