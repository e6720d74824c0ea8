"""What a command printed, and its exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepwarm.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON value it must be."""
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    def call(*arguments: str | Path, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        seen = capsys.readouterr()
        return Result(int(ended.value.code or 0), seen.out, seen.err)

    return call


ROOT = Path(__file__).parents[2]
START = (  # a process started in the background ignores SIGINT from birth: the handler is Python's own again
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def interrupted(arguments: list[str | Path], until: str, folder: Path, module: str = "keepwarm.cli") -> str:
    """What is said when a command is interrupted once it has printed a line with `until`."""
    command = [sys.executable, "-c", START, module, *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # of what is not installed
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": path}, **pipes) as child:  # type: ignore[call-overload]
        said = []
        for line in child.stderr:
            said.append(line)
            if until in line:
                child.send_signal(signal.SIGINT)
                break
        said.append(child.stderr.read())
        assert child.wait(timeout=120) == 130, "".join(said)
    return "".join(said)
