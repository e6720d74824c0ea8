"""Hybrids over what happens to a store: damage, purges, pins, bundles, remote tiers. The answer is the same to the bit,
and reuse ends at the last snapshot that is left. The model runs through transformers; for the compiled kernels see
test_recurrent_kernels.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.hybrids import HYBRIDS, asked, hybrid
from tests.helpers.remotes import RedisServer, redis_server

from keepwarm import Engine
from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.core.results import Entry, Generation
from keepwarm.core.spans import MissReason
from keepwarm.runtime.arena.states import Snapshot, States

FIRST, SECOND = asked("Which pier is the largest?"), asked("And the smallest one?")


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return hybrid("granitemoehybrid"), tokenizer


def opened(model: Any, store: Path | None, **settings: Any) -> Engine:
    return Engine.from_pretrained(model, store=store, **({"attention": "model"} | settings))


def ask(engine: Engine, chat: Any = SECOND, **arguments: Any) -> Generation:
    return engine.generate(messages=chat, **{"max_new_tokens": 4, "trace": True} | arguments)


@pytest.fixture(scope="module")
def cold(model: Any) -> Generation:
    with opened(model, None) as engine:
        return ask(engine, reuse="off")


def states(engine: Engine) -> list[Entry]:
    """The snapshots that are stored, the first of a prompt first."""
    found = [entry for entry in engine.pipeline.archive.contents.entries() if entry.kind == "snapshot"]
    return sorted(found, key=lambda entry: entry.end)


class Stored(NamedTuple):
    """A store with the first chat, and where the last two snapshots of it are that the second one can go on from."""

    folder: Path
    before: int
    last: int

    def files(self, engine: Engine) -> list[Path]:
        """Of these two."""
        ends = {entry.end: self.folder / "runs" / f"{entry.id}.safetensors" for entry in states(engine)}
        return [ends[self.before], ends[self.last]]


@pytest.fixture
def stored(model: Any, tmp_path: Path) -> Stored:
    with opened(model, tmp_path / "store") as engine:
        ask(engine, FIRST)
        engine.flush()
        *_, before, last = [entry.end for entry in states(engine)]
        stats = engine.stats()
        assert stats.snapshots["disk"] == len(states(engine))
        assert stats.snapshot_bytes["disk"] == sum(entry.bytes for entry in states(engine))
        assert ask(engine).cached_tokens == last
    return Stored(tmp_path / "store", before, last)


def _swap(path: Path, other: Path) -> None:
    content, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(content)


def _flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) - 40] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "flip": _flip,
    "truncate": lambda path, _: path.write_bytes(path.read_bytes()[:-100]),
    "half-written": lambda path, _: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "remove": lambda path, _: path.unlink(),
    "swap": _swap,  # neither is then what its name says
}


USUAL = ("flip", "swap")


@pytest.mark.parametrize(
    "how", [each if each in USUAL else pytest.param(each, marks=pytest.mark.slow) for each in DAMAGE]
)
def test_reuse_ends_at_the_snapshot_before_a_damaged_one(
    model: Any, cold: Generation, stored: Stored, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model, stored.folder) as engine, caplog.at_level(logging.WARNING):
        before, last = stored.files(engine)
        DAMAGE[how](last, before)
        found = ask(engine)
        assert (found.cached_tokens < stored.before) if how == "swap" else (found.cached_tokens == stored.before)
        assert (found.exactness, found.logits_digest) == ("exact", cold.logits_digest)
        assert engine.stats().corrupt == 1 + (how == "swap")
        assert "recomputed" in caplog.text
        engine.flush()
    with opened(model, stored.folder) as engine:
        again = ask(engine)
        assert (again.cached_tokens, again.logits_digest) == (stored.last, cold.logits_digest), "it is stored anew"


@pytest.mark.parametrize("max_ram", ["0B", pytest.param("1GiB", marks=pytest.mark.slow)])
def test_a_state_that_verifies_and_means_nothing_is_met_once(
    model: Any, cold: Generation, tmp_path: Path, max_ram: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its description is no JSON, and its checksums are in order."""
    take = States.take

    def spoilt(self: States) -> Snapshot:
        first, *others = take(self).layers
        bad = first.copy()
        bad[8:20] = 33
        return Snapshot(self.position or 0, (bad, *others))

    with opened(model, tmp_path, max_ram=max_ram) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(States, "take", spoilt)
            ask(engine, FIRST)
            engine.flush()
        wrong = len(states(engine))
        found = ask(engine)
        assert (found.cached_tokens, found.logits_digest) == (0, cold.logits_digest)
        assert engine.stats().corrupt == wrong
        engine.flush()
        again = ask(engine)
        assert again.cached_tokens > 0
        assert again.logits_digest == cold.logits_digest


def test_a_snapshot_of_another_model_is_not_taken_for_ones_own(
    model: Any, tokenizer: Any, cold: Generation, stored: Stored
) -> None:
    with opened((hybrid("granitemoehybrid", seed=1), tokenizer), stored.folder) as other:
        assert ask(other, FIRST).cached_tokens == 0
        other.flush()
        theirs = [entry for entry in states(other) if entry.end == stored.last]
    with opened(model, stored.folder) as engine:
        paths = [stored.folder / "runs" / f"{entry.id}.safetensors" for entry in theirs]
        _swap(*paths)
        found = ask(engine)
        assert (found.cached_tokens, found.logits_digest) == (stored.before, cold.logits_digest)


def test_without_any_snapshot_all_is_computed(model: Any, cold: Generation, stored: Stored) -> None:
    with opened(model, stored.folder) as engine:
        for entry in states(engine):
            engine.remove(entry.id)
        found = ask(engine)
        assert (found.cached_tokens, found.logits_digest) == (0, cold.logits_digest)
        assert found.miss is not None
        assert found.miss.reason == MissReason.STATE


def test_warming_stores_a_snapshot_that_is_gone(model: Any, cold: Generation, stored: Stored) -> None:
    """KV of the whole prompt is not enough: the next one goes on from its state."""
    with opened(model, stored.folder) as engine:
        engine.warm(messages=FIRST, name="desk")
        engine.flush()
        whole = states(engine)[-1]
        engine.remove(whole.id)
        report = engine.warm(messages=FIRST)
        assert report.reused_tokens < report.tokens
        engine.flush()
        assert states(engine)[-1].end == whole.end
        assert engine.warm(messages=FIRST).reused_tokens == report.tokens


def test_a_purged_salt_takes_its_snapshots(model: Any, cold: Generation, tmp_path: Path) -> None:
    with opened(model, tmp_path) as engine:
        ask(engine, FIRST, salt="mine")
        engine.flush()
        tag = salt_tag(salt_key("mine"))
        nodes = engine.pipeline.archive.contents.tree()
        assert [tag in node.salts for node in nodes] == [True] * 3
        engine.purge("mine")
        assert states(engine) == []
        assert not list((tmp_path / "runs").iterdir())
        assert ask(engine, salt="mine").cached_tokens == 0


@pytest.mark.slow
def test_a_pinned_prompt_hits_after_much_else(model: Any, cold: Generation, tmp_path: Path) -> None:
    with opened(model, None, max_ram="1MiB") as engine:
        engine.warm(messages=FIRST, name="desk")
        engine.flush()
        engine.pipeline.archive.contents.retain("desk", 3600.0)
        last = ask(engine).cached_tokens
        assert last
        for seed in range(8):
            engine.generate([*range(100 + seed, 1500 + seed)], max_new_tokens=1)
            engine.flush()
        assert engine.stats().evictions["ram"]
        engine.pipeline.pool.forget()
        found = ask(engine)
        assert found.cached_by_tier["ram"] == found.cached_tokens == last
        assert found.logits_digest == cold.logits_digest


@pytest.mark.parametrize(
    "family", [each if each == "qwen3_5_text" else pytest.param(each, marks=pytest.mark.slow) for each in HYBRIDS]
)
def test_a_bundle_hits_to_the_same_position_elsewhere(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model = hybrid(family), tokenizer
    with opened(model, tmp_path / "from") as engine:
        engine.warm(messages=FIRST, name="desk")
        engine.flush()
        exported = engine.pipeline.archive.contents.export("desk", tmp_path / "bundle")
        assert exported.snapshots == len(states(engine)) > 1
        here = ask(engine)
    with opened(model, tmp_path / "to") as engine:
        imported = engine.pipeline.archive.contents.import_(tmp_path / "bundle")
        assert imported.snapshots == exported.snapshots
        there = ask(engine)
        assert (there.cached_by_tier["disk"], there.exactness) == (here.cached_tokens, "exact")
        assert there.logits_digest == here.logits_digest == ask(engine, reuse="off").logits_digest


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.mark.parametrize("service", [pytest.param("redis", marks=pytest.mark.slow), "file"])
def test_another_replica_goes_on_from_a_remote_snapshot(
    model: Any, cold: Generation, tmp_path: Path, service: str, request: pytest.FixtureRequest
) -> None:
    remote = request.getfixturevalue("redis").url if service == "redis" else f"file://{tmp_path}/objects"
    far = {"remote": remote, "remote_timeout": 20.0, "remote_load_timeout": 20.0}
    with opened(model, tmp_path / "one", **far) as engine:
        ask(engine, FIRST)
        engine.flush()
        last = states(engine)[-1].end
    with opened(model, tmp_path / "two", **far) as engine:
        found = ask(engine)
        assert (found.cached_by_tier[service], found.exactness) == (last, "exact")
        assert found.logits_digest == cold.logits_digest
        engine.flush()
        assert [entry.end for entry in states(engine)][-1] == last, "it was brought nearer with its KV"
    with opened(model, tmp_path / "two") as engine:
        found = ask(engine)
        assert (found.cached_by_tier["disk"], found.logits_digest) == (last, cold.logits_digest)
