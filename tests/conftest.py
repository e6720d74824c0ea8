"""What all tests share: models with the embedded one's tokenizer, and the device that engines keep KV on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # torch programs side by side wait for each other at every barrier
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tests.helpers.models import tiny

from keepwarm.core.cost import Costs
from keepwarm.runtime.demo_model import demo_file, demo_model
from keepwarm.runtime.device import PORTS
from keepwarm.store import coming, storing
from keepwarm.testing.device import AdversarialPort

if find_spec("hypothesis"):  # vLLM's environment has none
    from hypothesis import settings

    # property tests are judged by what they find, not by the time one example takes on a busy machine
    settings.register_profile("no-deadline", deadline=None)
    settings.load_profile("no-deadline")

# ---- what a run of the tests is told ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--end-by", type=float, help="seconds since 1970: tests that would begin later are skipped")
    parser.addoption(
        "--device",
        choices=("cpu", "adversarial"),
        default="cpu",
        help="adversarial: engines on the processor keep KV on a device of `keepwarm.testing.device`",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the adversarial device, tests of what only the host's memory has are left out, with their own reasons. Tests
    of the service come first, so that of several processes one alone has to start its servers."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/serving/"))
    if config.getoption("--device") == "adversarial":
        for item in items:
            if marker := item.get_closest_marker("host_memory"):
                item.add_marker(pytest.mark.skip(reason=f"not on this device: {marker.args[0]}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    end = item.config.getoption("--end-by")
    if end is not None and time.time() > end:
        pytest.skip("left out: the time of this run (--end-by) was over")


# ---- the adversarial device ----


@pytest.fixture(scope="session", autouse=True)
def ports(request: pytest.FixtureRequest) -> Iterator[list[AdversarialPort]]:
    """Those that engines were given instead of the processor's; none without `--device adversarial`."""
    made: list[AdversarialPort] = []

    def make(device: torch.device) -> AdversarialPort:
        made.append(AdversarialPort(device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--device") == "adversarial":
            patch.setitem(PORTS, "cpu", make)
        yield made


@pytest.fixture(autouse=True)
def no_faults(ports: list[AdversarialPort]) -> Iterator[None]:
    """Nothing was copied that was not waited for."""
    yield
    faults = [fault for port in ports for fault in port.faults]
    for port in ports:
        port.faults.clear()
    assert not faults


# ---- the machine ----


@pytest.fixture(autouse=True)
def unhurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is stored is loaded, and what is on its way to the store is waited for, however slow the machine is just
    now. Tests of these very choices are marked `hurried`."""
    if not request.node.get_closest_marker("hurried"):
        monkeypatch.setattr(Costs, "worth_loading", lambda _, parts: len(parts))
        for module in (coming, storing):
            monkeypatch.setattr(module, "TIMEOUT", 10.0)


# ---- models ----


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """Folder of the embedded model. Its file is there, too, which earlier versions did not keep."""
    demo_file()
    return demo_model()


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo_folder)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., Path]:
    """Saves a tiny model with a tokenizer in a folder of its own, as `save_pretrained` does."""

    def save(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny(family, dtype, **settings).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
