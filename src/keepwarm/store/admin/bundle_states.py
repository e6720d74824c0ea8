"""Snapshots of recurrent state in a bundle: all that are stored along its prompt, each a run file after the prompt's.

Their names follow from the blocks at whose ends they stand, or from the beginnings of blocks. Like the blocks' names,
they are recomputed on import.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from keepwarm.core.blocks import Chain
from keepwarm.core.snapshots import PURPOSE, snapshot_block, snapshot_id
from keepwarm.errors import BundleError, CorruptRun
from keepwarm.store.admin.bundle_run import Carried, keep
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.layout import StoredBlock, new_run_id, stored_blocks
from keepwarm.store.runfile.new_run import NewRun
from keepwarm.store.runfile.reader import RunReader


def along(disk: DiskTier, prompt: NewRun, blocks: Chain, stack: ExitStack) -> list[tuple[RunReader, NewRun]]:
    """Return the snapshots stored in and behind a prompt's blocks, in order, each open until the stack closes. They
    stand on the bundle's blocks, even if they stood on others here. `blocks` are the prompt's blocks, named from its
    tokens. Raises CorruptRun, OSError and sqlite3.Error."""
    wanted = dict(_every_place(prompt, blocks))
    stored = disk.index.find([*wanted])
    found = []
    for name, at in ((name, at) for name, at in wanted.items() if name in stored):
        run_id = stored[name].run_id
        try:
            reader = stack.enter_context(RunReader.open(disk.files.path(run_id), run_id, disk.files.key))
            header, named = reader.header, (_named(prompt, blocks, at),)
            if [block.id for block in header.blocks] == [block.id for block in named]:
                header = replace(header, blocks=named)
            _check(header, prompt, blocks)
        except (CorruptRun, BundleError) as error:
            raise CorruptRun(f"run {run_id}: {error}; `keepwarm verify --repair` takes it out of use") from error
        found.append((reader, NewRun(new_run_id(), header.geometry, header.namespace, header.tokens, header.blocks)))
    return found


def _every_place(prompt: NewRun, blocks: Chain) -> Iterator[tuple[bytes, int]]:
    """Yield the name that a snapshot has at each position of a prompt, and the position. Behind KV that is not exact
    they stand at the ends of blocks only."""
    for number, stored in enumerate(prompt.blocks):
        if stored.id == blocks.exact[number]:
            yield from ((snapshot_id(blocks.up_to(at).exact), at) for at in range(stored.start + 1, stored.end))
        yield snapshot_id(stored.id), stored.end


def check(states: Sequence[Carried], prompt: NewRun, blocks: Chain) -> None:
    """Raise BundleError unless every snapshot is what its names say, and CorruptRun if one does not verify. `blocks`
    are the prompt's blocks, named from its tokens."""
    for state in states:
        _check(state.reader.header, prompt, blocks)
    if len({state.reader.header.blocks[0].id for state in states}) < len(states):
        raise BundleError("two snapshots in it stand at one position")
    for state in states:
        state.verify()


def store(disk: DiskTier, states: Sequence[Carried], epoch: int) -> None:
    """Store the snapshots that are not stored yet. Raises what `DiskTier.store` does, and CorruptRun."""
    stored = disk.index.find([state.reader.header.blocks[0].id for state in states])
    for state in states:
        if state.reader.header.blocks[0].id not in stored:
            keep(disk, state, [0], epoch)


def _check(header: RunHeader, prompt: NewRun, blocks: Chain) -> None:
    space: object = header.namespace  # whatever the file says
    if not header.geometry.is_state or not isinstance(space, dict) or space.get("purpose") != {"name": PURPOSE}:
        raise BundleError("a run beside its prompt is no snapshot of recurrent state")
    if any(space.get(part) != prompt.namespace[part] for part in ("model", "arithmetic")):
        raise BundleError("a snapshot in it was computed by another model, or under another arithmetic")
    at = header.blocks[-1].end
    if not 0 < at <= len(prompt.tokens) or header.parent != prompt.blocks[bisect_left(blocks.ends, at)].id:
        raise BundleError("a snapshot in it stands on no block of its prompt")
    named = _named(prompt, blocks, at)
    if header.blocks != (named,) or not np.array_equal(header.tokens, prompt.tokens[at - 1 : at]):
        raise BundleError(f"the names of the snapshot at {at} do not follow from the block that it stands on")


def _named(prompt: NewRun, blocks: Chain, at: int) -> StoredBlock:
    """Return the block of a snapshot, which stands in or behind a stored block."""
    number = bisect_left(blocks.ends, at)
    block, stored = blocks.up_to(at), prompt.blocks[number]
    name = stored.id if at == stored.end else block.exact
    return stored_blocks([snapshot_block(block)], ids=[snapshot_id(name)], parent=stored.id)[0]
