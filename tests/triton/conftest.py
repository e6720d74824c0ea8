"""Triton's kernels under Triton's interpreter, on the processor (`make test-triton`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.interpreter import WHY_NOT

if WHY_NOT:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_installed.py"]


@pytest.fixture(scope="session", autouse=True)
def hastened() -> Iterator[None]:
    """The interpreter patches Triton's language whenever a kernel calls a function, `tl.sum` for example, which takes
    most of its time. Once for each function in a launch is enough: only the launch takes it back."""
    if WHY_NOT:
        yield
        return
    from triton.runtime import interpreter

    patched: set[Any] = set()
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *given: Any, **named: Any) -> Any:
        patched.clear()
        return launch(self, *given, **named)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield
