"""The salts that a tenant stored under: none is lost by a purge, whenever it comes, in whichever service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.tenancy import salts as module
from keepwarm.serving.tenancy.salts import Salts


@pytest.fixture(params=["folder", "memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Salts, Salts]:
    """As two services have them; in memory one alone does."""
    if request.param == "memory":
        alone = Salts(None)
        return alone, alone
    return Salts(tmp_path), Salts(tmp_path)


def test_what_is_noted_while_a_purge_is_under_way_is_kept(pair: tuple[Salts, Salts]) -> None:
    one, other = pair
    for salt in ("a", "b\nb"):
        one.note("acme", salt)
    other.note("acme", "c")
    one.note("umbrella", "a")
    assert one.of("acme") == other.of("acme") == {"a", "b\nb", "c"}
    with one.purging("acme") as taken:
        assert taken == {"a", "b\nb", "c"}
        other.note("acme", "a")  # known before, and used again
        one.note("acme", "new")
        assert other.of("acme") == {"a", "b\nb", "c", "new"}
    assert one.of("acme") == other.of("acme") == {"a", "new"}
    with other.purging("acme") as taken:
        assert taken == {"a", "new"}
    assert one.of("acme") == frozenset()
    assert one.of("umbrella") == {"a"}


def test_a_purge_that_failed_forgets_nothing(pair: tuple[Salts, Salts]) -> None:
    one, other = pair
    one.note("acme", "a")

    def fail() -> None:
        with one.purging("acme"):
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        fail()
    assert other.of("acme") == {"a"}
    with other.purging("acme") as taken:
        assert taken == {"a"}


def test_two_purges_at_once(pair: tuple[Salts, Salts]) -> None:
    one, other = pair
    one.note("acme", "a")
    with one.purging("acme"):
        other.note("acme", "b")

        def break_off() -> None:
            with other.purging("acme") as taken:
                assert taken == {"a", "b"}
                raise OSError("the disk")

        with pytest.raises(OSError, match="the disk"):
            break_off()
    assert one.of("acme") == {"b"}, "that is not purged yet"


def test_a_service_that_is_killed_while_it_purges(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from keepwarm.serving.tenancy.salts import Salts
kept = Salts(Path({str(tmp_path)!r}))
kept.note("acme", "a")
with kept.purging("acme"):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert Salts(tmp_path).of("acme") == {"a"}


def test_there_are_only_so_many(pair: tuple[Salts, Salts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SALTS", 2)
    one, other = pair
    one.note("acme", "a")
    other.note("acme", "b")
    one.note("acme", "b")
    with pytest.raises(ApiError, match="2 different cache salts"):
        one.note("acme", "c")
