"""`keepwarm doctor` where something is broken: that becomes a finding, and the rest is looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tests.helpers.doctor import Look, filled

from keepwarm.runtime.native.build import kernels


@pytest.fixture(autouse=True)
def _kernels() -> None:
    """Have the kernels before something is broken: a process remembers that they could not be compiled."""
    kernels()


@contextmanager
def as_nobody(*entered: Path) -> Iterator[None]:
    """Be an ordinary user, who may enter these folders, where the tests run as root."""
    if os.geteuid():
        yield
        return
    for folder in (path for each in entered for path in (each, *each.parents)):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_without_torch_the_rest_is_looked_at(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    code, found = look("--store", filled(tmp_path / "store"))
    assert code == 7
    assert found["kernels"]["status"] == found["device"]["status"] == "fail"
    assert "torch cannot be imported" in found["kernels"]["detail"]
    assert (found["contents"]["status"], found["port"]["status"]) == ("ok", "ok")


def test_a_package_that_is_not_installed_fails(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "torch":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("keepwarm.cli.doctor.machine.version", version)
    code, found = look("--store", tmp_path / "none")
    assert (code, found["machine"]["status"], found["machine"]["advice"]) == (7, "fail", "pip install torch")


def test_a_level_that_nobody_knows(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_KERNELS", "nonsense")
    code, found = look("--store", tmp_path / "none")
    assert (code, found["kernels"]["status"], found["port"]["status"]) == (7, "fail", "ok")
    assert "KEEPWARM_KERNELS is one of" in found["kernels"]["detail"]
    assert "unset it" in found["kernels"]["advice"]


def test_without_a_home(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("KEEPWARM_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    code, found = look()
    assert (code, found["cache"]["status"], found["settings"]["status"]) == (7, "fail", "fail")
    assert "kernels" in found
    assert "name one for Keepwarm's cache with KEEPWARM_CACHE" in found["cache"]["detail"]


def test_folders_that_may_not_be_entered(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o000)
    monkeypatch.setenv("KEEPWARM_CACHE", str(shut / "cache"))
    with as_nobody(tmp_path):
        code, found = look("--store", shut / "store", "--model", shut / "model")
    assert code == 7
    assert [found[name]["status"] for name in ("cache", "store", "model", "port")] == ["fail", "fail", "fail", "ok"]
