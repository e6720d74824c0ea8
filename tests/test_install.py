"""What `make` runs before anything is installed: its steps, its bars, and the kernels beside them."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from keepwarm.core import levels
from tools import install

needs_gcc = pytest.mark.skipif(not install.gnu(["g++"]), reason="no GCC, or not on Linux")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_silent_step_is_drawn_all_the_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('Collecting things'); time.sleep(0.6)"]
    terminal = Terminal()
    with redirect_stderr(terminal):
        install.step(install.Shown(), "packages", command, tmp_path / "log", lambda last: None)
    drawn = terminal.getvalue().split(install.CLEAR)
    assert len({line.partition("━")[0] for line in drawn}) > 1  # the bar wanders
    assert "packages  done in" in drawn[-1]
    assert "Collecting things" in (tmp_path / "log").read_text()


def test_a_step_that_fails_shows_what_it_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(SystemExit) as ended:
        install.step(install.Shown(), "torch", command, tmp_path / "log", lambda last: None)
    assert ended.value.code == 3
    assert "no such package" in capsys.readouterr().err


def test_the_share_of_what_is_unpacked(tmp_path: Path) -> None:
    share = install.unpacked(tmp_path)
    (tmp_path / "pip-1.dist-info").mkdir()
    assert share("Collecting torch") is None
    assert share("Installing collected packages: a, b, c, d") == 0.0
    (tmp_path / "a-1.dist-info").mkdir()
    assert share("Installing collected packages: a, b, c, d") == 0.25


@needs_gcc
def test_kernels_lie_where_those_of_a_wheel_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("kernels.cpp", "watch.cpp"):
        (tmp_path / name).write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(install, "SOURCES", tmp_path)
    monkeypatch.setattr(install, "BESIDE", ("watch.cpp",))
    made = install.Kernels()
    made.run()
    (folder,) = (tmp_path / levels.DELIVERED).iterdir()
    level = levels.level_named(folder.name, levels.machine())
    plain = levels.kernels_defines(level, in_blocks=False, adapters=False)
    names = {
        levels.library_name(tmp_path / "kernels.cpp", level, plain),
        levels.library_name(tmp_path / "watch.cpp", level, ()),
    }
    assert {file.name for file in folder.iterdir()} == names
    assert (made.did, made.all) == (2, 2)
    (tmp_path / "watch.cpp").write_text('extern "C" int two() { return 2; }')
    made = install.Kernels()
    made.run()
    assert (made.did, made.all) == (1, 1)
    assert len(list(folder.iterdir())) == 2  # what was made of earlier sources is gone


def test_it_starts_with_the_standard_library_alone() -> None:
    """No package is there when it begins: what it takes from Keepwarm, by path, needs none either."""
    begins = (
        "from tools import install; install.by_path('levels', 'core/levels.py'); "
        "install.by_path('processor', 'runtime/processor.py').cpu_flags()"
    )
    assert (
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {begins}"],
            cwd=install.ROOT,
            check=False,
        ).returncode
        == 0
    )
