"""SGLang's own files, from its wheel unpacked in `.peers/sglang` (`make test-sglang`).

`import sglang` itself needs torchvision and, through it, libc10_cuda.so: on a machine without CUDA it raises
"operator torchvision::nms does not exist". The storage interface needs none of it: the package's folder is entered
without running `sglang/__init__.py`, and everything below is SGLang's.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

WHEEL = Path(__file__).parents[2] / ".peers" / "sglang"

if importlib.util.find_spec("sglang") is None and (WHEEL / "sglang").is_dir():
    package = types.ModuleType("sglang")
    package.__path__ = [str(WHEEL / "sglang")]
    sys.modules["sglang"] = package
    sys.path.append(str(WHEEL))  # its metadata has the version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="SGLang is not unpacked: make test-sglang"))
