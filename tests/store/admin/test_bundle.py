"""Bundles: a stored prompt carried to another store, checked before anything of it is published."""

from __future__ import annotations

import json
import os
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.helpers.archives import CAP, LENGTH, Prompt
from tests.helpers.bundles import made, store

from keepwarm.core.blocks import PrefixNames, chain, derived_id
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import salt_key
from keepwarm.core.plan import LinkPlan
from keepwarm.core.schedule import Schedule
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.errors import BundleError, ConfigError, StoreError, StoreTooNew
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.store import Archive
from keepwarm.store.admin import bundle_file as container
from keepwarm.store.runfile.header import file_bytes
from keepwarm.store.runfile.layout import Run, new_run_id, stored_blocks
from keepwarm.store.runfile.writer import write_run
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

KEY = bytes(range(32))
GRID = Schedule(128, 0)
Exported = tuple[Prompt, Path]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    file = tmp_path / "prompt.bundle"
    return made(tmp_path / "from", file), file


def test_a_prompt_arrives_equal_to_the_bit_with_its_names(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    with store(tmp_path / "to") as archive:
        report = archive.contents.import_(file)
        assert (report.tokens, report.blocks, report.new_blocks, report.signed) == (56, 7, 7, False)
        assert report.namespace == namespace().describe()
        assert archive.contents.names() == {"support bot": one.ids[6], "the same": one.ids[6]}
        assert one.loads(archive) == {"disk": 56}
        again = archive.contents.import_(file)
        assert (again.blocks, again.new_blocks) == (7, 0)
        assert len(archive.contents.entries()) == 1
        for block in one.blocks[:7]:
            assert [ref.id for ref in archive.children(block.parent_prefix)] == [block.exact]


def test_what_comes_after_the_prompt_is_not_carried(exported: Exported) -> None:
    """The run that holds the prompt's end goes on with a question: that stays at home."""
    one, file = exported
    with safe_open(file, "numpy") as opened:
        assert json.loads(opened.metadata()["names"]) == ["support bot", "the same"]
        assert opened.get_slice("run").get_shape()[0] > 0
    raw = file.read_bytes()
    assert one.tokens[52:56].tobytes() in raw
    assert one.tokens[56:58].tobytes() not in raw
    assert one.kv.arrays[0][0][0, 56:58].tobytes() not in raw


def test_only_what_is_missing_is_stored(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    with store(tmp_path / "to") as archive:
        one.put(archive, 0, 2)
        archive.flush()
        assert archive.contents.import_(file).new_blocks == 5
        assert sorted(entry.tokens for entry in archive.contents.entries()) == [16, 40]
        assert one.loads(archive) == {"disk": 56}


@pytest.mark.parametrize(("home", "away"), [(KEY, None), (None, KEY), (KEY, bytes(32))])
def test_encrypted_stores_exchange_bundles(tmp_path: Path, home: bytes | None, away: bytes | None) -> None:
    one = made(tmp_path / "from", tmp_path / "b", home)
    with store(tmp_path / "to", away) as archive:
        archive.contents.import_(tmp_path / "b")
        assert one.loads(archive) == {"disk": 56}


def plan(archive: Archive, one: Prompt, torch: str, reuse: Reuse) -> LinkPlan:
    """What an engine of the same model under some arithmetic would reuse for the prompt and more."""
    space = namespace(torch=torch)
    tokens = prompt(LENGTH + 8)
    assert (tokens[:LENGTH] == one.tokens).all()
    blocks = chain(tokens, [*range(8, LENGTH + 8, 8), LENGTH + 8], space)
    return link(NamedPrompt(tokens, blocks, PrefixNames(tokens, space), GRID), archive, reuse)


def test_another_machines_arithmetic_is_at_most_prefix(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    with store(tmp_path / "to") as archive:
        archive.contents.import_(file)
        same = plan(archive, one, "2.9", Reuse.EXACT)
        assert (same.cached_tokens, same.exactness) == (56, Exactness.EXACT)
        assert plan(archive, one, "3.0", Reuse.EXACT).cached_tokens == 0
        other = plan(archive, one, "3.0", Reuse.PREFIX)
        assert (other.cached_tokens, other.exactness) == (56, Exactness.PREFIX)


def test_another_model_is_refused_by_name_and_never_matches(tmp_path: Path, exported: Exported) -> None:
    one, file = exported
    wanted = namespace("others").describe()["model"]
    with store(tmp_path / "to") as archive:
        with pytest.raises(
            BundleError, match=r"another model: it has weights weights; the model given has weights oth"
        ):
            archive.contents.import_(file, model=wanted)
        assert archive.contents.entries() == []
        archive.contents.import_(file, model=namespace().describe()["model"])
        space = namespace("others")
        theirs = blocks_of(one.tokens, 8, space)
        assert archive.lookup([block.exact for block in theirs]) == ()
        names = PrefixNames(one.tokens, space)
        assert link(NamedPrompt(one.tokens, theirs, names, GRID), archive, Reuse.PREFIX).cached_tokens == 0


def test_derived_blocks_are_carried_under_their_own_ids(tmp_path: Path) -> None:
    one = Prompt()
    ids: list[bytes] = []
    for block in one.blocks:
        ids.append(derived_id(ids[-1] if ids else block.parent_exact, block))
    with store(tmp_path / "from") as archive:
        archive.put(one.kv, one.blocks, namespace(), ids)
        archive.flush()
        archive.contents.export(archive.contents.entries()[0].id, tmp_path / "b")
    with store(tmp_path / "to") as archive:
        archive.contents.import_(tmp_path / "b")
        assert len(archive.lookup(ids)) == 8
        assert archive.lookup(one.ids) == ()


def test_a_salted_prompt_stays_where_it_is(tmp_path: Path) -> None:
    tokens = prompt(LENGTH)
    blocks = chain(tokens, [*range(8, LENGTH + 1, 8)], namespace(), {0: salt_key("tenant")})
    with store(tmp_path / "from") as archive:
        archive.put(MemoryKV.random(UNEVEN, LENGTH), blocks, namespace())
        archive.flush()
        with pytest.raises(BundleError, match="under a salt"):
            archive.contents.export(archive.contents.entries()[0].id, tmp_path / "b")
    assert list(tmp_path.glob("*b*")) == []


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    one = Prompt()
    with store(tmp_path / "from") as archive:
        one.put(archive)
        archive.flush()
        with pytest.raises(StoreError, match="nothing is named"):
            archive.contents.export("nothing", tmp_path / "b")
        with pytest.raises(BundleError, match="none/b"):
            archive.contents.export(one.ids[0].hex(), tmp_path / "none" / "b")
        path = next((tmp_path / "from" / "runs").iterdir())
        path.write_bytes(path.read_bytes()[:-3] + b"bad")
        with pytest.raises(StoreError, match="checksum"):
            archive.contents.export(one.ids[-1].hex(), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
    with Archive.open(None, max_ram=CAP, max_disk=0) as archive, pytest.raises(BundleError, match="no folder"):
        archive.contents.export("nothing", tmp_path / "b")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Ed25519 key pairs as openssl makes them: private, public."""

    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        private, public = folder / "private.pem", folder / "public.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
        return private, public

    return make


def test_a_signature_is_asked_for_and_checked(
    tmp_path: Path, exported: Exported, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    one, unsigned = exported
    mine, theirs = keys("mine"), keys("theirs")
    signed = tmp_path / "signed"
    with store(tmp_path / "from") as archive:
        assert archive.contents.export("support bot", signed, sign_key=mine[0]).signed
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError, match="signed by nobody"):
            archive.contents.import_(unsigned, verify_key=mine[1])
        with pytest.raises(BundleError, match="signed by another key"):
            archive.contents.import_(signed, verify_key=theirs[1])
        for wrong in (mine[0], tmp_path / "none", signed):
            with pytest.raises(ConfigError):
                archive.contents.import_(signed, verify_key=wrong)
        assert archive.contents.entries() == []
        assert archive.contents.import_(signed, verify_key=mine[1]).signed
        assert one.loads(archive) == {"disk": 56}
    with store(tmp_path / "from") as archive, pytest.raises(ConfigError, match="private key"):
        archive.contents.export("support bot", signed, sign_key=mine[1])


def test_a_signed_header_over_another_run_is_refused(
    tmp_path: Path, exported: Exported, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    """An intact run of the same size in place of the signed one: every checksum fits but the signed digest."""
    _, _ = exported
    private, public = keys("signer")
    signed, other = tmp_path / "signed", tmp_path / "other"
    with store(tmp_path / "from") as archive:
        archive.contents.export("support bot", signed, sign_key=private)
        archive.contents.export("support bot", other)  # has another run id
    head = 8 + int.from_bytes(signed.read_bytes()[:8], "little")
    assert 8 + int.from_bytes(other.read_bytes()[:8], "little") == head
    signed.write_bytes(signed.read_bytes()[:head] + other.read_bytes()[head:])
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError, match="SHA-256"):
            archive.contents.import_(signed, verify_key=public)
        assert archive.contents.entries() == []
        assert not list((tmp_path / "to" / "runs").iterdir())


def in_its_place(signed: Path, run: Run, target: Path) -> Path:
    """A bundle with the metadata of a signed one, signature included, over another run."""
    with container.opened(signed) as (_, meta, _, _):
        note = json.loads(meta.get("note", "{}"))
        names, sha256 = json.loads(meta["names"]), bytes.fromhex(meta["run_sha256"])
        head = container.encode(
            container.metadata(names, sha256, bytes.fromhex(meta["signature"]), note), file_bytes(run)
        )
    with target.open("xb") as out:
        write_run(out.fileno(), run, run.layers(), at=len(head))
        os.pwrite(out.fileno(), head, 0)
    return target


def test_a_run_without_layers_does_not_pass_for_the_signed_one(
    tmp_path: Path, exported: Exported, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    one, _ = exported
    private, public = keys("signer")
    signed = tmp_path / "signed"
    with store(tmp_path / "from") as archive:
        archive.contents.export("support bot", signed, sign_key=private)
    empty = Run(
        new_run_id(),
        KVGeometry((), "bfloat16"),
        namespace().describe(),
        one.tokens,
        stored_blocks(one.blocks),
        np.empty(0, np.uint8),
    )
    forged = in_its_place(signed, empty, tmp_path / "forged")
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError, match="SHA-256"):
            archive.contents.import_(forged, verify_key=public)
        assert archive.contents.entries() == []
        assert archive.contents.names() == {}


def test_what_is_stored_already_is_hashed_before_a_name_is_moved_to_it(
    tmp_path: Path, exported: Exported, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    """A signed name over a run that the store holds: nothing is left to store, and all of it to check."""
    one, _ = exported
    private, public = keys("signer")
    signed = tmp_path / "signed"
    with store(tmp_path / "from") as archive:
        archive.contents.export("support bot", signed, sign_key=private)
    tokens = prompt(24, seed=9)
    blocks, kv = blocks_of(tokens), MemoryKV.random(UNEVEN, 24, 9)
    forged = in_its_place(signed, make_run(kv, blocks), tmp_path / "forged")
    with store(tmp_path / "to") as archive:
        archive.put(kv, blocks, namespace())
        archive.flush()
        with pytest.raises(BundleError, match="SHA-256"):
            archive.contents.import_(forged, verify_key=public)
        assert archive.contents.names() == {}
        archive.contents.import_(signed, verify_key=public)
        assert archive.contents.import_(signed, verify_key=public).new_blocks == 0
        assert one.loads(archive) == {"disk": 56}


def test_a_bundle_for_another_form_of_kv_is_refused_when_the_model_is_known(tmp_path: Path, exported: Exported) -> None:
    _, file = exported
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError, match="KV"):
            archive.contents.import_(file, geometry=KVGeometry(UNEVEN.layers[:2], "bfloat16"))
        assert archive.contents.entries() == []
        assert archive.contents.import_(file, geometry=UNEVEN).new_blocks == 7


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_refused_before_anything_is_published(
    tmp_path: Path, exported: Exported, data: st.DataObject
) -> None:
    _, file = exported
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = [
        good[:at],
        good + good[: at + 1],
        good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :],
        b"",
        b"x" * at,
    ]
    changed = tmp_path / "changed"
    changed.write_bytes(data.draw(st.sampled_from(bad)))
    with store(tmp_path / "to") as archive:
        with pytest.raises(BundleError):
            archive.contents.import_(changed)
        assert archive.contents.entries() == []
        assert archive.contents.names() == {}
        assert not list((tmp_path / "to" / "runs").iterdir())


def test_names_that_do_not_follow_from_the_tokens_are_refused(tmp_path: Path, exported: Exported) -> None:
    """A bundle that claims another model's names for its KV, with every checksum in order."""
    one, _ = exported
    with store(tmp_path / "forged") as archive:
        archive.put(one.kv, one.blocks, namespace("others"))  # names of one model, described as another's
        archive.flush()
        with pytest.raises(BundleError, match="do not follow"):
            archive.contents.export(one.ids[-1].hex(), tmp_path / "b")


def test_a_newer_bundle_is_told_from_a_damaged_one(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(container, "_PLAIN", container.VERSION + 1)
        made(tmp_path / "newer", tmp_path / "b")
    with store(tmp_path / "to") as archive, pytest.raises(StoreTooNew, match="newer Keepwarm"):
        archive.contents.import_(tmp_path / "b")


def test_a_bundle_is_never_whole_in_memory(tmp_path: Path) -> None:
    geometry = KVGeometry.uniform(24, 2, 32, "float32")
    length = 1024  # 12.6 MB
    tokens = prompt(length)
    blocks = blocks_of(tokens, 256)
    source = MemoryKV.random(geometry, length)
    with Archive.open(tmp_path / "from", max_ram=0, max_disk=1 << 28) as archive:
        archive.put(source, blocks, namespace())
        archive.flush()
        tracemalloc.start()
        archive.contents.export(blocks[-1].exact.hex(), tmp_path / "b")
        peak_out = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    with Archive.open(tmp_path / "to", max_ram=0, max_disk=1 << 28) as archive:
        tracemalloc.start()
        archive.contents.import_(tmp_path / "b")
        peak_in = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sink = MemoryKV(geometry, length)
        archive.load(archive.lookup([block.exact for block in blocks]), tokens, length, sink)
        assert sink.same(source, 0, length)
    layer = length * 2 * 2 * 32 * 4
    assert peak_in < 6 * layer + (1 << 20)
    assert peak_out < 6 * layer + (1 << 20)
    assert (tmp_path / "b").stat().st_size > 20 * layer
