"""Bundles of prompts with recurrent state: the snapshots along a prompt travel with it, checked as its KV is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.helpers.bundles import store
from tests.helpers.states import SPACE, STATE, Stateful, stored

from keepwarm.core.snapshots import snapshot_block, snapshot_id
from keepwarm.errors import BundleError, CorruptRun
from keepwarm.store.admin import bundle_file as container
from keepwarm.store.runfile.header import file_bytes
from keepwarm.store.runfile.layout import Run, stored_blocks
from keepwarm.store.runfile.writer import write_run
from keepwarm.testing.kv import MemoryKV, make_run, namespace

Exported = tuple[Stateful, Path]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """A prompt of seven blocks in two runs, with snapshots along it and one behind its end."""
    file = tmp_path / "prompt.bundle"
    with store(tmp_path / "from") as archive:
        one = stored(archive, states=(1, 2, 6, 7))
        archive.contents.name("bot", one.ids[6])
        report = archive.contents.export("bot", file)
    assert (report.tokens, report.blocks, report.snapshots) == (56, 7, 3)
    assert report.nbytes == file.stat().st_size
    return one, file


def test_the_snapshots_along_a_prompt_arrive_with_it(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    with store(tmp_path / "to", key=bytes(range(32))) as archive:
        report = archive.contents.import_(file)
        assert (report.new_blocks, report.snapshots) == (7, 3)
        assert one.loads(archive) == {"disk": 56}
        assert one.taken(archive) == [1, 2, 6]
        assert archive.contents.import_(file).new_blocks == 0
        assert sorted(entry.kind for entry in archive.contents.entries()) == ["kv", *["snapshot"] * 3]


def test_only_what_is_missing_is_stored(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    with store(tmp_path / "to") as archive:
        one.put(archive, 0, 3)
        one.take(archive, 1)
        archive.flush()
        archive.contents.import_(file)
        kinds = sorted((entry.kind, entry.end) for entry in archive.contents.entries())
        assert kinds == [("kv", 24), ("kv", 56), ("snapshot", 16), ("snapshot", 24), ("snapshot", 56)]
        assert one.taken(archive) == [1, 2, 6]


def test_a_bundle_is_a_safetensors_file(exported: Exported) -> None:
    _, file = exported
    with safe_open(file, "np") as opened:
        assert list(opened.keys()) == ["run", "snapshot.000", "snapshot.001", "snapshot.002"]
        assert opened.metadata()["keepwarm_bundle"] == "3"


def test_a_prompt_without_snapshots_makes_the_bundle_that_it_always_made(tmp_path: Path) -> None:
    with store(tmp_path / "from") as archive:
        one = stored(archive, states=())
        archive.contents.name("bot", one.ids[6])
        assert archive.contents.export("bot", tmp_path / "bundle").snapshots == 0
    with safe_open(tmp_path / "bundle", "np") as opened:
        assert list(opened.keys()) == ["run"]
        assert opened.metadata()["keepwarm_bundle"] == "1"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_refused_before_anything_is_published(
    tmp_path: Path, exported: Exported, data: st.DataObject
) -> None:
    """Half of the changes are made where the snapshots lie."""
    _, file = exported
    good = file.read_bytes()
    with container.opened(file) as (_, _, at, nbytes):
        behind = at + nbytes
    where = data.draw(st.integers(0, len(good) - 1) | st.integers(behind, len(good) - 1))
    flipped = good[:where] + bytes([good[where] ^ (1 << where % 8)]) + good[where + 1 :]
    changed = tmp_path / "changed"
    changed.write_bytes([flipped, good[:where], good + good[: where + 1]][data.draw(st.integers(0, 2))])
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError):
            archive.contents.import_(changed)
        assert archive.contents.entries() == []
        assert archive.contents.names() == {}


def bundle_of(target: Path, run: Run, states: Sequence[Run], **changes: Any) -> Path:
    """A bundle with every checksum in order, of whatever runs."""
    with target.open("wb") as out:
        meta = container.metadata(["bot"], bytes(32), b"", {}, [(file_bytes(state), bytes(32)) for state in states])
        head = len(container.encode(meta, file_bytes(run)))
        at, digests = head, []
        for each in (run, *states):
            write_run(out.fileno(), each, each.layers(), at=at)
            out.flush()
            content = target.read_bytes()[at : at + file_bytes(each)]
            digests.append((len(content), hashlib.sha256(content).digest()))
            at += len(content)
        meta = container.metadata(["bot"], digests[0][1], b"", {}, digests[1:])
        os.pwrite(out.fileno(), container.encode(meta | changes, file_bytes(run)), 0)
    return target


def state_of(one: Stateful, number: int, space: Any = SPACE, **changes: Any) -> Run:
    """A snapshot's run, with other fields of its block."""
    block = snapshot_block(one.blocks[number])
    record = stored_blocks([block], ids=[snapshot_id(one.ids[number])], parent=one.ids[number])[0]
    return Run.copy_from(one.states, [replace(record, **changes)], block.tokens, space.describe())


def refused(folder: Path, file: Path, why: str) -> None:
    with store(folder) as archive:
        with pytest.raises(BundleError, match=why):
            archive.contents.import_(file)
        assert archive.contents.entries() == []
        assert archive.contents.names() == {}


def test_a_snapshot_in_order_is_taken(tmp_path: Path) -> None:
    """So what the next tests change is what they are refused for."""
    one = Stateful()
    file = bundle_of(tmp_path / "bundle", make_run(one.kv, one.blocks), [state_of(one, 2)])
    with store(tmp_path / "to") as archive:
        assert archive.contents.import_(file).snapshots == 1
        assert one.taken(archive) == [2]


def test_a_snapshot_inside_a_block_goes_along_whatever_it_stood_on(tmp_path: Path) -> None:
    """It is found by its name, and stands on a block of the bundle afterwards."""
    one, at = Stateful(), 21
    part = one.blocks.up_to(at)
    name = snapshot_id(part.exact)
    with store(tmp_path / "from") as archive:
        one.put(archive, 0, 8)
        archive.put(one.states, [snapshot_block(part)], SPACE, ids=[name], parent=one.ids[1])
        archive.flush()
        archive.contents.name("bot", one.ids[7])
        assert archive.contents.export("bot", tmp_path / "bundle").snapshots == 1
    with store(tmp_path / "to") as archive:
        assert archive.contents.import_(tmp_path / "bundle").snapshots == 1
        (ref,) = archive.find([name]).values()
        sink = MemoryKV(STATE, len(one.tokens))
        archive.load([ref], one.tokens[at - 1 : at], at, sink)
        assert sink.same(one.states, at - 1, at)
        archive.remove(next(entry.id for entry in archive.contents.entries() if entry.kind == "kv"))
        assert archive.contents.entries() == []


FORGED = {
    "of another block": ({"id": snapshot_id(b"other")}, "do not follow"),
    "behind another block": ({"parent": b"p" * 32}, "no block of its prompt"),
    "with another prefix name": ({"prefix": b"p" * 32}, "do not follow"),
    "under a salt": ({"salts": (b"s" * 32,)}, "do not follow"),
    "at another position": ({"start": 22}, "do not follow"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_snapshot_that_names_something_else_is_refused(tmp_path: Path, what: str) -> None:
    one = Stateful()
    changes, why = FORGED[what]
    state = state_of(one, 2)
    state = replace(state, blocks=(replace(state.blocks[0], **changes),))
    refused(tmp_path / "to", bundle_of(tmp_path / "bundle", make_run(one.kv, one.blocks), [state]), why)


def test_a_snapshot_of_another_position_in_its_place_is_refused(tmp_path: Path) -> None:
    one = Stateful()
    swapped = replace(state_of(one, 4), blocks=state_of(one, 2).blocks)  # its own token, another block's names
    refused(tmp_path / "to", bundle_of(tmp_path / "bundle", make_run(one.kv, one.blocks), [swapped]), "do not follow")


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    one = Stateful()
    for space in (namespace("others"), namespace(torch="2.8")):
        state = state_of(one, 2, replace(space, purpose=SPACE.purpose))
        file = bundle_of(tmp_path / "bundle", make_run(one.kv, one.blocks), [state])
        refused(tmp_path / "to", file, "another model")


def test_what_is_no_snapshot_is_refused_beside_a_prompt(tmp_path: Path) -> None:
    one = Stateful()
    run = make_run(one.kv, one.blocks)
    for state in (make_run(one.kv, one.blocks[2:3]), state_of(one, 2, namespace())):
        refused(tmp_path / "to", bundle_of(tmp_path / "bundle", run, [state]), "no snapshot")
    refused(tmp_path / "to", bundle_of(tmp_path / "bundle", run, [state_of(one, 2)] * 2), "two snapshots")


@pytest.fixture
def signer(tmp_path: Path) -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_a_signature_answers_for_the_snapshots(tmp_path: Path, exported: Exported, signer: tuple[Path, Path]) -> None:
    one, _ = exported
    private, public = signer
    with store(tmp_path / "from") as archive:
        assert archive.contents.export("bot", tmp_path / "signed", sign_key=private).signed
    with container.opened(tmp_path / "signed") as (_, meta, _, _):
        signature = meta["signature"]
        assert len(json.loads(meta["snapshots"])) == 3
    one.states = MemoryKV.random(STATE, 64, 9)
    run = make_run(one.kv, one.blocks[:7])
    forged = bundle_of(tmp_path / "forged", run, [state_of(one, 6)], signature=signature)
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError, match="signed by another key"):
            archive.contents.import_(forged, verify_key=public)
        assert archive.contents.entries() == []
        assert archive.contents.import_(tmp_path / "signed", verify_key=public).snapshots == 3


def test_a_damaged_snapshot_stops_the_export(tmp_path: Path) -> None:
    with store(tmp_path / "from") as archive:
        one = stored(archive, states=(2,))
        (state,) = [entry for entry in archive.contents.entries() if entry.kind == "snapshot"]
        path = tmp_path / "from" / "runs" / f"{state.id}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        with pytest.raises(CorruptRun):
            archive.contents.export(one.ids[6].hex(), tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()
