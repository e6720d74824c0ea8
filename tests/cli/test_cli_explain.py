"""`keepwarm explain` in a terminal: what changes where reuse ended, and the rule that would mend it."""

from __future__ import annotations

import tomllib

import pytest

from keepwarm.cli.explain import print_explanation
from keepwarm.core.results import Explanation, Miss
from keepwarm.core.spans import Segment, SegmentKind


def explained(wanted: str, stored: str, changed: str = "system") -> Explanation:
    miss = Miss(9, "system", "tokens_differ", "they differ", wanted, stored, changed=changed, lost_tokens=500)
    return Explanation(600, 9, {"ram": 9}, "exact", (Segment(SegmentKind.SYSTEM, 0, 600),), (), 9, miss)


def test_what_changes_is_named_with_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(explained("Hello.\n\x1b[31mToday is 2026-11-25.", "Hello.\n\x1b[31mToday is 2026-11-24."))
    out = capsys.readouterr().out
    assert "a date or a time, as it looks: '2026-11-25'" in out
    assert "500 tokens" in out
    assert "\x1b" not in out
    (rule,) = tomllib.loads(out[out.index("[[rewrite]]") :])["rewrite"]
    assert rule == {
        "name": "timestamp",
        "pattern": r"\x1b\[31mToday is \d{4}-\d{1,2}-\d{1,2}",
        "where": ["system"],
        "action": "move",
    }


@pytest.mark.parametrize(("wanted", "changed"), [("Hello there.", "system"), ("It is 2026-11-25.", "salt")])
def test_what_is_not_known_is_not_guessed(capsys: pytest.CaptureFixture[str], wanted: str, changed: str) -> None:
    print_explanation(explained(wanted, "It is 2026-11-24.", changed))
    assert "rewrite" not in capsys.readouterr().out
