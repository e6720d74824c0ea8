"""Damage, caps, a full disk and a purge: always a miss, never another answer."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.llamacpp_host import prompt

from keepwarm.errors import StoreFull, StoreLocked
from keepwarm.integrations.llamacpp.context import Context
from keepwarm.store.disk import fsck

LENGTH = 200


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "store" / "runs").iterdir())


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_kind(path: Path) -> None:
    path.write_bytes(b"\x80\x04not a run" * 500)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("damage", [flipped, cut, emptied, of_another_kind, Path.unlink])
def test_damage_is_a_miss(damage: Callable[[Path], None], kind: str, start: Any, tmp_path: Path) -> None:
    ids = prompt(LENGTH, 1)
    first = start(kind)
    first.ask(ids)
    first.close()
    for path in runs(tmp_path):
        damage(path)
    second = start(kind)
    answer = second.ask(ids)
    assert answer.cached == 0
    assert answer.agrees(second.cold(ids))
    second.ask(ids)  # stored again
    second.flush()
    assert start(kind).ask(ids).cached == LENGTH - 1


def test_one_damaged_run_leaves_the_others(start: Any, tmp_path: Path) -> None:
    ids = prompt(LENGTH, 2)
    first = start()
    first.ask(ids[:100])
    first.flush()
    known = set(runs(tmp_path))
    first.forget()
    first.ask(ids)
    first.close()
    for path in set(runs(tmp_path)) - known:
        flipped(path)
    second = start()
    answer = second.ask(ids)
    assert 90 < answer.cached <= 100
    assert answer.agrees(second.cold(ids))


def test_foreign_files_are_no_kv(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "runs"
    ids = prompt(LENGTH, 3)
    start().ask(ids)
    host = start()
    (folder / "notes.txt").write_text("of somebody else")
    (folder / ("0" * 32 + ".safetensors")).write_bytes(b"\x08" + bytes(40))
    assert host.ask(ids).agrees(host.cold(ids))
    assert (folder / "notes.txt").exists()


def test_a_state_that_llama_cpp_refuses_is_a_miss(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with its last bytes missing: the context is emptied, and the prompt is computed."""
    ids = prompt(LENGTH, 4)
    host = start()
    host.ask(ids)
    host.flush()
    put = Context.put
    monkeypatch.setattr(Context, "put", lambda self, data, tokens: put(self, data[:-7].copy(), tokens))
    host.forget()
    answer = host.ask(ids)
    assert answer.cached == 0
    assert answer.agrees(host.cold(ids))


def test_the_cap_holds(start: Any, tmp_path: Path) -> None:
    cap = 1 << 20
    host = start(cache={"max_disk": cap})
    for seed in range(30):
        host.ask(prompt(LENGTH, 100 + seed))
    host.flush()
    assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()) <= cap
    newest = prompt(LENGTH, 129)
    host.forget()
    answer = host.ask(newest)
    assert answer.cached == LENGTH - 1
    assert answer.agrees(host.cold(newest))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), StoreFull("under the cap")])
def test_a_full_disk_costs_only_reuse(error: Exception, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise error

    ids = prompt(LENGTH, 5)
    host = start()
    with monkeypatch.context() as patch:
        patch.setattr("keepwarm.store.disk.run_files.write_run", full)
        answer = host.ask(ids)
        host.flush()
    stats = host.cache.archive.stats()
    assert stats["dropped_writes"] + stats["store_errors"] == 1
    assert answer.agrees(host.cold(ids))
    host.ask(ids)
    host.flush()
    host.forget()
    assert host.ask(ids).cached == LENGTH - 1


def test_a_purge_between_question_and_answer_leaves_nothing(start: Any, tmp_path: Path) -> None:
    """Another process purges the tenant while the answer is computed: the answer's KV is not stored afterwards."""
    ids = prompt(LENGTH, 6)
    tenant, operator = start(cache={"salt": "tenant"}), start(cache={"salt": "tenant"})
    with pytest.raises(KeyError):
        tenant.cache[ids]
    operator.cache.purge()
    tenant.llm.eval(ids)
    tenant.cache[ids] = tenant.llm.save_state()
    tenant.flush()
    assert runs(tmp_path) == []
    tenant.forget()
    tenant.ask(ids)
    tenant.flush()
    assert len(runs(tmp_path)) == 1


def test_what_is_stored_is_sound_and_people_see_it(start: Any, tmp_path: Path) -> None:
    for kind in ("llama", "mamba", "lfm2"):
        host = start(kind)
        host.ask(prompt(LENGTH, 7))
        host.close()
    assert fsck.verify(tmp_path / "store").findings == ()
    with start().cache as cache:
        entries = cache.archive.contents.entries()
    assert {entry.kind for entry in entries} == {"kv", "snapshot"}


def test_an_encrypted_store(start: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, ids = tmp_path / "key", prompt(LENGTH, 9)
    key.write_text("ab" * 32)
    asked = {"store_key_file": key}
    first = start(cache=asked)
    first.ask(ids)
    first.close()
    second = start(cache=asked)
    answer = second.ask(ids)
    assert answer.cached == LENGTH - 1
    assert answer.agrees(second.cold(ids))
    with pytest.raises(StoreLocked):
        start()


def test_images_set_later_are_neither_looked_up_nor_stored(start: Any, tmp_path: Path) -> None:
    class Images:
        """Named as the library's own handlers of images have it."""

        mtmd_ctx = None

    host, ids = start(), prompt(LENGTH, 10)
    host.llm.chat_handler = Images()
    host.ask(ids)
    host.flush()
    assert runs(tmp_path) == []
    assert host.ask(ids).cached == 0


def test_a_closed_cache_stores_nothing_and_harms_nothing(start: Any) -> None:
    host, ids = start(), prompt(LENGTH, 8)
    host.cache.close()
    assert host.ask(ids).agrees(host.cold(ids))
