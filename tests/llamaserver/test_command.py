"""What `keepwarm slots` refuses before it serves. No server is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepwarm.cli.app import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slot-path", "not/there"], "--slot-path"),
        (["--slot-path", ".", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--slot-path", ".", "--host", "192.0.2.1", "--port", "0"], "192.0.2.1"),
        (["--slot-path", ".", "--max-disk", "much"], "max_disk"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["slots", "--store", str(tmp_path / "store"), "--port", "0", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
