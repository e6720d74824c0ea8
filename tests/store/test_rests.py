"""Pages that are stored from where they differ: found, loaded and joined to the bit, in every tier."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.pages import CAP, GRID, PAGE, Store, ids, joined, kv_of
from tests.helpers.remote_archives import PATIENT

from keepwarm.compiler.emit import fresh_blocks
from keepwarm.core.blocks import PrefixNames, TokenIds, chain, token_ids
from keepwarm.core.identity import salt_key
from keepwarm.core.spans import Reuse
from keepwarm.linker.diagnose import _nearest
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.linker.prefix import matching_tokens, token_prefix
from keepwarm.store import Archive
from keepwarm.store.admin.bundle import export_bundle, import_bundle
from keepwarm.store.disk.fsck import verify
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.layout import Run
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace


@pytest.mark.parametrize("max_ram", [CAP, 0], ids=["ram", "disk"])
def test_a_question_behind_a_document_is_stored_alone(tmp_path: Path, max_ram: int) -> None:
    store = Store(tmp_path, max_ram=max_ram)
    document = ids(3 * PAGE + 11, 1)
    asked = [joined(document, token_ids([100 + n]), ids(19, n)) for n in range(8)]
    assert store.put(asked[0]) == len(asked[0])
    for prompt in asked[1:]:
        assert store.put(prompt) == 20
    store.reopen()
    for prompt in asked:
        assert store.find(prompt)[0] == len(prompt) - 1
    new = joined(document, token_ids([99]))
    assert store.find(new)[0] == len(document)
    store.archive.close()


def test_a_conversation_of_short_turns_is_written_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    text = ids(PAGE + 5, 1)
    written = store.put(text)
    for turn in range(40):
        text = joined(text, ids(7, 100 + turn))
        written += store.put(text)
    assert written == len(text)
    store.reopen()
    assert store.archive.compact() > 1
    assert store.find(joined(text, ids(3, 9)))[0] == len(text)
    store.archive.close()
    assert verify(tmp_path).damage == 0


def test_a_rest_may_stand_on_a_rest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    head = ids(PAGE, 1)
    texts = [joined(head, token_ids([*range(60, 60 + at), 200 + at]), ids(6, at)) for at in (4, 9, 15, 20)]
    nested = joined(head, token_ids([60, 61, 62, 63, 204, *ids(2, 4).tolist(), 300, 301]))
    for text in (*texts, nested, joined(nested, ids(70, 5))):
        new = len(text) - store.best(text)
        assert store.put(text) == new
    store.reopen()
    for text in (*texts, nested):
        assert store.find(text)[0] == len(text) - 1
    store.archive.close()


def test_nothing_is_left_that_stands_on_what_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    document = ids(PAGE + 11, 1)
    store.put(joined(document, ids(20, 2)))
    base = store.archive.contents.entries()[0].id
    store.put(joined(document, token_ids([77]), ids(19, 3)))
    store.archive.remove(base)
    assert store.archive.contents.entries() == []
    store.known.clear()
    assert store.put(joined(document, token_ids([77]), ids(19, 3))) == len(document) + 20
    assert store.find(joined(document, token_ids([77]), ids(19, 3)))[0] == len(document) + 19
    store.archive.close()


def test_a_damaged_beginning_ends_the_match_before_its_page(tmp_path: Path) -> None:
    store = Store(tmp_path, max_ram=0)
    document = ids(PAGE + 11, 1)
    store.put(joined(document, ids(20, 2)))
    (file,) = (tmp_path / "runs").iterdir()
    last = joined(document, token_ids([77]), ids(19, 3))
    store.put(last)
    file.write_bytes(file.read_bytes()[:-200])
    store.reopen()
    assert store.find(last)[0] == 0  # the whole family is taken out of use
    assert store.put(last) == len(last)
    assert store.find(last)[0] == len(last) - 1
    store.archive.close()


@pytest.mark.parametrize("head", [11, 2 * PAGE + 11])
def test_a_bundle_holds_whole_pages(tmp_path: Path, head: int) -> None:
    store = Store(tmp_path / "one")
    document = ids(head, 1)
    store.put(joined(document, ids(20, 2)))
    text = joined(document, token_ids([77]), ids(9, 3))
    store.put(text)
    text = joined(text, ids(100, 4))
    store.put(text)
    blocks = chain(text, GRID.cuts(len(text)), namespace())
    disk = store.archive._disk
    assert disk is not None
    export_bundle(disk, blocks[-1].exact, ["text"], tmp_path / "text.kwb")
    other = Store(tmp_path / "two", max_ram=0)
    assert other.archive._disk is not None
    assert import_bundle(other.archive._disk, tmp_path / "text.kwb", other.archive.epoch()).tokens == len(text)
    assert other.find(text)[0] == len(text) - 1
    store.archive.close()
    other.archive.close()


def test_the_catalogue_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path, max_ram=0)
    document = ids(PAGE + 11, 1)
    texts = [joined(document, token_ids([100 + n]), ids(19, n)) for n in range(4)]
    for text in texts:
        store.put(text)
    store.archive.close()
    (tmp_path / "catalogue.sqlite").write_bytes(b"no catalogue at all" * 300)
    for name in ("-wal", "-shm"):
        (tmp_path / f"catalogue.sqlite{name}").unlink(missing_ok=True)
    store.archive = store._open()
    for text in texts:
        assert store.find(text)[0] == len(text) - 1
    store.archive.close()


def test_remote_tiers_get_whole_pages(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'far'}"
    document = ids(2 * PAGE + 11, 1)
    texts = [joined(document, token_ids([100 + n]), ids(2 * PAGE, n)) for n in range(3)]
    with Archive.open(tmp_path / "near", max_ram=CAP, max_disk=CAP, remotes=[url], limits=PATIENT) as archive:
        for text in texts:
            blocks = chain(text, GRID.cuts(len(text)), namespace())
            found = len(archive.lookup([block.exact for block in blocks]))
            archive.put(kv_of(text), blocks[found:], namespace(), names=PrefixNames(text, namespace()))
            archive.flush()
        assert sum(entry.tokens for entry in archive.contents.entries()) == len(texts[0]) + 2 * (2 * PAGE + 1)
    with Archive.open(None, max_ram=0, max_disk=0, remotes=[url], limits=PATIENT) as archive:
        for text in texts:
            blocks = chain(text, GRID.cuts(len(text)), namespace())
            refs, end = matching_tokens(blocks, archive, 0, {})
            assert end == len(text) - 1
            sink = MemoryKV(UNEVEN, len(text))
            archive.load(refs, text[:end], end, sink)
            assert sink.same(kv_of(text), 0, end)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_beginning_is_found_to_the_token(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random trees of prompts, with and without a salt behind some tokens, in RAM and on disk alone, opened again."""
    keys = data.draw(st.sampled_from([{}, {0: salt_key("one")}, {45: salt_key("one")}]))
    store = Store(
        tmp_path_factory.mktemp("store"), keys=keys, max_ram=data.draw(st.sampled_from([0, 1 << 16, CAP]), "ram")
    )
    seed = data.draw(st.integers(0, 1 << 30), "seed")
    drawn = random.Random(seed)
    trunk = ids(50, seed)
    for _ in range(data.draw(st.integers(3, 14), "prompts")):
        base = drawn.choice(store.known) if store.known else trunk
        cut = max(46, drawn.randrange(len(base) + 1)) if keys else drawn.randrange(len(base) + 1)
        more = drawn.choice([1, 2, 7, 20, 31, 32, 33, 70, 800])
        text = joined(base[:cut], token_ids(drawn.choices(range(3), k=more)))
        best = store.best(text)
        assert store.find(text)[0] == best
        shared = drawn.random() < 0.9
        written = store.put(text, shared=shared)
        assert not shared or written <= len(text) - best
        if drawn.random() < 0.3:
            store.reopen()
        if drawn.random() < 0.3:
            store.archive.compact()
        if drawn.random() < 0.3:
            store.archive.clear_ram()
    for text in store.known:
        assert store.find(text)[0] == len(text) - 1
    store.archive.close()
    assert verify(store.folder).damage == 0


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1 << 30))
def test_tokens_are_found_whatever_computed_them(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """`reuse="prefix"`: under another arithmetic the exact names are others."""
    store = Store(tmp_path_factory.mktemp("store"))
    drawn = random.Random(seed)
    text = ids(50, seed)
    for _ in range(8):
        store.put(text)
        text = joined(text[: drawn.randrange(len(text) + 1)], token_ids(drawn.choices(range(3), k=drawn.randrange(70))))
        if not len(text):
            text = ids(1, seed)
        found = token_prefix(text, PrefixNames(text, namespace(torch="3.0")), store.archive, (), 0)
        if found:
            (load,) = found
            assert load.end <= store.best(text)
            sink = MemoryKV(UNEVEN, len(text))
            store.archive.load(load.refs, text[: load.end], load.end, sink)
            assert sink.same(kv_of(text), 0, load.end)
    store.archive.close()


def test_a_conversation_is_found_whatever_computed_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    text = ids(PAGE + 5, 1)
    for turn in range(6):
        store.put(text)
        text = joined(text, ids(9, 100 + turn))
    (load,) = token_prefix(text, PrefixNames(text, namespace(torch="3.0")), store.archive, (), 0)
    assert load.end == len(text) - 9
    store.archive.close()


def fresh(archive: Archive, text: TokenIds, found: int = 0) -> None:
    """Offer a prompt's blocks behind `found`, stored or not."""
    blocks = [block for block in chain(text, GRID.cuts(len(text)), namespace()) if block.end > found]
    archive.put(kv_of(text), blocks, namespace(), names=PrefixNames(text, namespace()))
    archive.flush()


def test_what_stayed_in_ram_is_written_with_what_follows(tmp_path: Path) -> None:
    """Offered again or not, and never as the rest of itself."""
    rules = Rules(min_write=64)
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP, rules=rules) as archive:
        text = ids(3 * PAGE + 20, 1)
        fresh(archive, text)
        for turn in range(6):
            known, text = text, joined(text, ids(20, 2 + turn))
            fresh(archive, text, found=0 if turn % 2 else len(known))
            disk = archive._disk
            assert disk is not None
            written = sum(row.tokens for row in disk.index.runs())
            assert len(text) - written < 64
        assert sum(run.blocks[0].parent in {block.id for block in run.blocks} for run in archive._ram.runs()) == 0
        archive.clear_ram()
        assert archive._ram.runs() == ()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_rest_is_stored_anew(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path, max_ram=0)
    document = ids(PAGE + 11, 1)
    store.put(joined(document, ids(20, 2)))
    before = set((tmp_path / "runs").iterdir())
    last = joined(document, token_ids([77]), ids(19, 3))
    store.put(last)
    (rest,) = set((tmp_path / "runs").iterdir()) - before
    if damage == "cut":
        rest.write_bytes(rest.read_bytes()[:50])
    else:
        rest.unlink()
    store.reopen()
    assert store.find(last)[0] == len(document)
    assert store.put(last) == 20
    assert store.find(last)[0] == len(last) - 1
    store.archive.close()


def test_ram_may_hold_a_page_and_its_rest(tmp_path: Path) -> None:
    far = f"file://{tmp_path / 'far'}"
    document = joined(ids(PAGE, 1), token_ids([5] * 10))
    page = joined(document, token_ids([5] * 22))
    text = joined(page, ids(40, 5))
    with Archive.open(tmp_path / "one", max_ram=CAP, max_disk=CAP, remotes=[far], limits=PATIENT) as archive:
        fresh(archive, text)
    with Archive.open(tmp_path / "two", max_ram=CAP, max_disk=CAP) as archive:
        fresh(archive, joined(document, token_ids([1, 2, 3])))
        fresh(archive, page)
    with Archive.open(tmp_path / "two", max_ram=CAP, max_disk=CAP, remotes=[far], limits=PATIENT) as archive:
        asked = joined(text, token_ids([9]))
        refs, _ = matching_tokens(chain(asked, GRID.cuts(len(asked)), namespace()), archive, 0, {})
        archive.promote([ref.run_id for ref in refs if ref.tier == "disk"])
        archive.flush()
        archive.pull(refs)
        archive.flush()
        for prompt in (asked, joined(document, token_ids([5] * 6 + [3]))):
            (load,) = token_prefix(prompt, PrefixNames(prompt, namespace(torch="3.0")), archive, (), 0)
            sink = MemoryKV(UNEVEN, len(prompt))
            archive.load(load.refs, prompt[: load.end], load.end, sink)
            assert load.end == len(prompt) - 1
            assert sink.same(kv_of(prompt), 0, load.end)
        archive.clear_ram()
        assert archive._ram.runs() == ()


def test_a_run_is_replicated_once(tmp_path: Path) -> None:
    far = f"file://{tmp_path / 'far'}"
    document = ids(PAGE + 10, 1)
    text = joined(document, token_ids([77]), ids(6 * PAGE, 2))
    with Archive.open(tmp_path / "one", max_ram=0, max_disk=CAP) as archive:
        fresh(archive, joined(document, ids(9, 3)))
        fresh(archive, text, found=len(document))
    with Archive.open(tmp_path / "one", max_ram=0, max_disk=CAP, remotes=[far], limits=PATIENT) as archive:
        sent: list[Run] = []
        behind = archive.remotes._all[0]
        submit = behind.submit
        behind.submit = lambda run, epoch: (sent.append(run), submit(run, epoch))[1]  # type: ignore[method-assign]
        blocks = chain(text, GRID.cuts(len(text)), namespace())
        archive.replicate([block.exact for block in blocks])
        archive.flush()
        assert len(sent) == 2
    with Archive.open(None, max_ram=0, max_disk=0, remotes=[far], limits=PATIENT) as archive:
        assert matching_tokens(blocks, archive, 0, {})[1] == len(text) - 1


def test_a_region_begins_inside_a_stored_page(tmp_path: Path) -> None:
    text, keys = ids(100, 1), {45: salt_key("a")}
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        fresh(archive, text)
        blocks = chain(text, GRID.cuts(len(text), regions=keys), namespace(), keys)
        names = PrefixNames(text, namespace(), keys)
        plan = link(NamedPrompt(text, blocks, names, GRID), archive, Reuse.EXACT)
        assert plan.prefix_end == 45
        archive.put(kv_of(text), fresh_blocks(blocks, plan).blocks, namespace(), names=names)
        archive.flush()
        assert link(NamedPrompt(text, blocks, names, GRID), archive, Reuse.EXACT).prefix_end == 99


def test_a_miss_is_told_where_a_rest_ends(tmp_path: Path) -> None:
    document = ids(PAGE + 10, 1)
    stored = joined(document, token_ids([77]), ids(25, 3))
    text = joined(stored[: PAGE + 25], token_ids([78]), ids(10, 4))
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        fresh(archive, joined(document, ids(30, 2)))
        fresh(archive, stored, found=len(document))
        found = _nearest(text, PrefixNames(text, namespace()), archive, PAGE)
        assert found is not None
        assert found.end == PAGE + 25
        assert found.parts is not None
        assert found.parts[1].tolist() == stored[PAGE + 25 : 2 * PAGE].tolist()
