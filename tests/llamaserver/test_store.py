"""What is kept lies in a store like any other: listed, verified, purged, capped and shared. Damage is a miss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.llamaserver_hosts import Host, Keeping, prompt

HEAD = 300


def command(*arguments: str, code: int = 0) -> str:
    ran = subprocess.run([sys.executable, "-m", "keepwarm.cli", *arguments], capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    return ran.stdout


def test_commands_work_on_it(host: Callable[..., Host], keep: Callable[..., Keeping], tmp_path: Path) -> None:
    server, store = host(), str(tmp_path / "store")
    keeping = keep(server, "--salt", "ours")
    ids = prompt(HEAD, 1)
    keeping.ask([*ids, 5])
    keeping.saved()
    keeping.stop()
    listed = json.loads(command("ls", "--store", store, "--json"))["entries"]
    assert sum(each["tokens"] for each in listed) >= HEAD
    assert json.loads(command("verify", "--store", store, "--json"))["damage"] == 0
    server.restart()
    keeping = keep(server, "--salt", "theirs")
    assert keeping.ask([*ids, 6, 7]).restored == 0
    keeping.stop()
    command("purge", "--salt", "ours", "--store", store)
    server.restart()
    assert keep(server, "--salt", "ours").ask([*ids, 6, 7]).restored == 0


def test_damage_is_a_miss(host: Callable[..., Host], keep: Callable[..., Keeping], tmp_path: Path) -> None:
    server = host()
    keeping = keep(server)
    ids = prompt(HEAD, 2)
    cold = keeping.ask([*ids, 5])
    keeping.saved()
    keeping.stop()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    runs = [path for path in files if "catalog" not in path.name and ".db" not in path.name]
    assert runs
    for path in runs:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    command("verify", "--store", str(tmp_path / "store"), code=6)
    server.restart()
    keeping = keep(server)
    again = keeping.ask([*ids, 5])
    assert (again.restored, again.cached) == (0, 0)
    assert again.told == cold.told
    keeping.saved()
    keeping.settled()
    server.restart()
    assert keeping.ask([*ids, 6, 7]).restored == HEAD


@pytest.mark.parametrize(
    "other", [("llama", 1, ()), ("llama", 0, ("--rope-freq-base", "5000")), ("llama", 0, ("-ctk", "q8_0"))]
)
def test_kv_of_another_model_or_another_setting_is_a_miss(
    host: Callable[..., Host], keep: Callable[..., Keeping], other: tuple[str, int, tuple[str, ...]]
) -> None:
    kind, seed, more = other
    ids = prompt(HEAD, 3)
    keeping = keep(host())
    keeping.ask([*ids, 5])
    keeping.saved()
    another = keep(host(kind, *more, seed=seed, slots="others"))
    found = another.ask([*ids, 5])
    assert (found.restored, found.cached) == (0, 0)
    assert keeping.ask([*ids, 6, 7]).cached == HEAD


def test_a_slot_with_another_content_than_was_asked_is_not_stored(
    host: Callable[..., Host], keep: Callable[..., Keeping]
) -> None:
    server = host("llama", "--parallel", "1")
    keeping = keep(server)
    one, two = prompt(HEAD, 4), prompt(HEAD, 5)
    keeping.ask([*one, 5])
    keeping.saved()
    server.ask([*two, 5])  # straight: nobody knows whose it is
    found = keeping.ask([*two, 6, 7])
    assert (found.restored, found.cached) == (0, 0)
    keeping.saved(2)
    server.ask(prompt(HEAD, 6))
    assert keeping.ask([*one, 6, 7]).restored == HEAD


def test_two_servers_share_a_store(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    one, two = keep(host()), keep(host("llama", slots="others"))
    first, second = prompt(HEAD, 7), prompt(HEAD, 8)
    one.ask([*first, 5])
    two.ask([*second, 5])
    one.saved()
    two.saved()
    assert two.ask([*first, 6, 7]).restored == HEAD
    assert one.ask([*second, 6, 7]).restored == HEAD


def test_shared_beginnings_are_stored_once(
    host: Callable[..., Host], keep: Callable[..., Keeping], tmp_path: Path
) -> None:
    keeping = keep(host())
    head = prompt(HEAD, 9)
    keeping.ask(head + prompt(40, 10))
    keeping.saved()
    keeping.ask(head + prompt(40, 11))
    keeping.saved(2)
    keeping.stop()
    listed = json.loads(command("ls", "--store", str(tmp_path / "store"), "--json"))["entries"]
    assert HEAD < sum(each["tokens"] for each in listed) < HEAD + 2 * 100


def test_the_cap_holds(host: Callable[..., Host], keep: Callable[..., Keeping], tmp_path: Path) -> None:
    keeping = keep(host(), "--max-disk", "1MiB")
    for seed in range(8):  # 230 KiB each
        keeping.ask(prompt(HEAD, 20 + seed))
        keeping.settled()
    keeping.stop()
    assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()) <= 1 << 20
