"""Snapshots of recurrent state in a bundle: all that are stored along its prompt, each a run file after the prompt's.

Their names follow from the blocks at whose ends they stand. Like the blocks' names, they are recomputed on import.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from keepwarm.core.blocks import Block
from keepwarm.core.snapshots import PURPOSE, snapshot_block, snapshot_id
from keepwarm.errors import BundleError, CorruptRun
from keepwarm.store.admin.bundle_run import Carried, keep
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.layout import StoredBlock, new_run_id, stored_blocks
from keepwarm.store.runfile.new_run import NewRun
from keepwarm.store.runfile.reader import RunReader


def along(disk: DiskTier, prompt: NewRun, blocks: Sequence[Block], stack: ExitStack) -> list[tuple[RunReader, NewRun]]:
    """Return the snapshots stored at the ends of a prompt's blocks, in order, each open until the stack closes.
    `blocks` are the prompt's blocks, named from its tokens. Raises CorruptRun, OSError and sqlite3.Error."""
    wanted = [snapshot_id(block.id) for block in prompt.blocks]
    stored = disk.index.find(wanted)
    found = []
    for ref in (stored[name] for name in wanted if name in stored):
        try:
            reader = stack.enter_context(RunReader.open(disk.files.path(ref.run_id), ref.run_id, disk.files.key))
            header = reader.header
            _check(header, prompt, blocks)
        except (CorruptRun, BundleError) as error:
            raise CorruptRun(f"run {ref.run_id}: {error}; `keepwarm verify --repair` takes it out of use") from error
        found.append((reader, NewRun(new_run_id(), header.geometry, header.namespace, header.tokens, header.blocks)))
    return found


def check(states: Sequence[Carried], prompt: NewRun, blocks: Sequence[Block]) -> None:
    """Raise BundleError unless every snapshot is what its names say, and CorruptRun if one does not verify. `blocks`
    are the prompt's blocks, named from its tokens."""
    for state in states:
        _check(state.reader.header, prompt, blocks)
    if len({state.reader.header.blocks[0].id for state in states}) < len(states):
        raise BundleError("two snapshots in it stand on one block")
    for state in states:
        state.verify()


def store(disk: DiskTier, states: Sequence[Carried], epoch: int) -> None:
    """Store the snapshots that are not stored yet. Raises what `DiskTier.store` does, and CorruptRun."""
    stored = disk.index.find([state.reader.header.blocks[0].id for state in states])
    for state in states:
        if state.reader.header.blocks[0].id not in stored:
            keep(disk, state, [0], epoch)


def _check(header: RunHeader, prompt: NewRun, blocks: Sequence[Block]) -> None:
    space: object = header.namespace  # whatever the file says
    if not header.geometry.is_state or not isinstance(space, dict) or space.get("purpose") != {"name": PURPOSE}:
        raise BundleError("a run beside its prompt is no snapshot of recurrent state")
    if any(space.get(part) != prompt.namespace[part] for part in ("model", "arithmetic")):
        raise BundleError("a snapshot in it was computed by another model, or under another arithmetic")
    number = next((n for n, block in enumerate(prompt.blocks) if block.id == header.parent), None)
    if number is None:
        raise BundleError("a snapshot in it stands on no block of its prompt")
    last = blocks[number].tokens[-1:]
    if header.blocks != (_named(prompt.blocks[number], blocks[number]),) or not np.array_equal(header.tokens, last):
        raise BundleError(
            f"the names of the snapshot at {blocks[number].end} do not follow from the block that it stands on"
        )


def _named(stored: StoredBlock, block: Block) -> StoredBlock:
    """Return the block of the snapshot at the end of a stored block."""
    return stored_blocks([snapshot_block(block)], ids=[snapshot_id(stored.id)], parent=stored.id)[0]
