"""Commands of `make` that workflows and documents name: the Makefile has their targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = {
    target
    for names in re.findall(r"^([^\s#:=][^:=]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in names.split()
}
_RUN = re.compile(r"(?:^|&&|;|run:)\s*(?:[A-Z]+=\S+ )*make(?=\s|$)([^\n&;|]*)", re.MULTILINE)


def _files() -> Iterator[Path]:
    yield from sorted((ROOT / ".github").rglob("*.yml"))
    yield from sorted((ROOT / ".github").rglob("*.md"))
    yield from (ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "tests" / "README.md")
    yield from (path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "decisions")


def _asked(text: str, *, markdown: bool) -> list[str]:
    """The targets that commands of a text ask for. Of Markdown only code is read."""
    if markdown:
        fenced = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
        inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        text = "\n".join([*fenced, *(" ".join(each.split()) for each in inline)])
    words = [word for line in _RUN.findall(text) for word in shlex.split(line, comments=True)]
    return [word for word in words if "=" not in word and word != "..."]


@pytest.mark.parametrize("file", list(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_targets_that_are_named_are_there(file: Path) -> None:
    asked = _asked(file.read_text(encoding="utf-8"), markdown=file.suffix == ".md")
    assert [target for target in asked if target not in TARGETS] == []


def test_help_names_what_is_there() -> None:
    shown = re.findall(r'@echo "make (\S+)', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(shown) <= TARGETS


def test_a_target_that_is_gone_is_found() -> None:
    workflow = "# make finds it\n      - run: make docs\n        run: |\n          make .venv/bin/python\n"
    assert _asked(workflow, markdown=False) == ["docs", ".venv/bin/python"]
    page = (
        'We make it so.\n```sh\nmake test ARGS="a b"  # all\ncd x && PYTHON=p make gpu\n```\n`make\nclean`, `make ...`'
    )
    assert _asked(page, markdown=True) == ["test", "gpu", "clean"]
    assert {"docs", "test", "gpu", "clean", ".venv/.installed-dev"} <= TARGETS
    assert ".venv/bin/python" not in TARGETS
