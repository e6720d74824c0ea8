"""Two texts side by side: marked as text, coloured in a terminal, and harmless whatever they hold."""

from __future__ import annotations

import io
import sys

import pytest

from keepwarm.cli.diff import print_side_by_side


def test_marks_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_side_by_side(("stored", "at 09:00, Grüße 👋"), ("asked", "at 10:00, Grüße 👋"))
    assert capsys.readouterr().out == "stored: at [-09-]:00, Grüße 👋\nasked: at {+10+}:00, Grüße 👋\n"


def test_control_characters_are_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    print_side_by_side(("a", "x\x1b[31m \ud800"), ("b", "x\t\n"))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b" in out
    assert "\\t\\n" in out
    assert "\\ud800" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", terminal)
    print_side_by_side(("stored", "one two [bold]three"), ("asked", "one 2 [bold]three"))
    shown = terminal.getvalue()
    assert "\x1b[1;31mtwo" in shown
    assert "\x1b[1;32m2" in shown
    assert "[bold]three" in shown
