"""Asks a running server what it saves of a slot, and whether it uses what it restores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.ports import Bytes
from keepwarm.integrations.llamacpp.form import Form, State, Unreadable, read_state
from keepwarm.integrations.llamacpp.memory import StateSource
from keepwarm.integrations.llamaserver.server import LlamaServer
from keepwarm.integrations.llamaserver.slot_file import SlotFile, SlotPlace, read_slot

PREFIX = "keepwarm-"  # of files in the slots' folder
_TOKENS, _MORE = 16, 4
_EVERY = 1 << 16  # sections
_LEFT = 600.0  # seconds after which nobody waits for a file any longer


class Unusable(Exception):
    """Why nothing can be kept of this server's slots."""


@dataclass(frozen=True)
class Probe:
    """What a server saves: the beginning of its files, and the form of its states, of which the first `most` sections
    are taken apart. `digest` names the KV of some tokens."""

    head: bytes
    form: Form
    most: int
    digest: str

    def state_of(self, saved: SlotFile) -> State:
        """Read a saved slot's state. Raises Unreadable if it is not in this form."""
        state = read_state(saved.state, len(saved.tokens), self.most)
        if saved.head != self.head or state.form != self.form:
            raise Unreadable("llama-server wrote this slot in another form")
        return state


def file_in(folder: Path) -> Path:
    """Return a new name of a file in the slots' folder."""
    return folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}.bin"


def clear(folder: Path) -> None:
    """Remove files with prompts that a killed process left in the slots' folder, or a save that came too late."""
    for path in folder.glob(f"{PREFIX}*-{'[0-9a-f]' * 16}.bin"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT:
                path.unlink()


async def probe(server: LlamaServer, slot: int, folder: Path) -> Probe:
    """Compute, save and restore some tokens in a slot, which is empty afterwards. Raises Unusable, and Refused when the
    server does not answer."""
    path = file_in(folder)
    tokens = token_ids(np.arange(3, 3 + _TOKENS + _MORE))
    try:
        await server.evaluate(slot, tokens[:_TOKENS], fresh=True)
        saved = await _saved(server, slot, path)
        if not np.array_equal(saved.tokens, tokens[:_TOKENS]):
            raise Unusable("another program uses this server's slots at the same time")
        for most in (_EVERY, 0):  # as parts, else as a whole
            found = _form(saved, most)
            if found is not None and await _is_used(server, slot, path, tokens, saved, found):
                return found
    except Unreadable as error:
        raise Unusable(f"a saved slot cannot be read: {error}") from None
    finally:
        path.unlink(missing_ok=True)
        await server.erase(slot)
    raise Unusable("this server computes a restored prompt anew: it saves no context checkpoints, which windows need")


async def _saved(server: LlamaServer, slot: int, path: Path) -> SlotFile:
    await server.save(slot, path.name)
    try:
        return read_slot(path)
    except FileNotFoundError:
        raise Unusable(f"the server saves slots elsewhere: start it with --slot-save-path {path.parent}") from None


def _form(saved: SlotFile, most: int) -> Probe | None:
    state = read_state(saved.state, len(saved.tokens), most)
    if most and not state.sections:
        return None
    return Probe(saved.head, state.form, most, _digest(state))


async def _is_used(server: LlamaServer, slot: int, path: Path, tokens: TokenIds, saved: SlotFile, found: Probe) -> bool:
    """Whether the server goes on from a file that was put together from the parts of a saved one, and still holds those
    parts afterwards."""
    state = found.state_of(saved)
    place = SlotPlace(found.form, found.head, path)
    place.put(_rebuilt(place, state), saved.tokens)
    await server.erase(slot)
    await server.restore(slot, path.name)
    if await server.evaluate(slot, tokens) != _TOKENS:
        return False
    if found.form.has_tail:  # it has moved on
        return True
    after = await _saved(server, slot, path)
    return _rows(found.state_of(after), _TOKENS) == _rows(state, _TOKENS)


def _rebuilt(place: SlotPlace, state: State) -> Bytes:
    source, sink = StateSource(state), place.sink(_TOKENS, state.tail)
    for layer in range(len(source.geometry.layers)):
        for kv in (0, 1):
            sink.fill(layer, kv, 0, source.read(layer, kv, 0, _TOKENS))
    return sink.finish()


def _rows(state: State, count: int) -> list[bytes]:
    source = StateSource(state)
    return [source.read(at, kv, 0, count).tobytes() for at in range(len(source.geometry.layers)) for kv in (0, 1)]


def _digest(state: State) -> str:
    found = hashlib.sha256()
    for rows in _rows(state, _TOKENS):
        found.update(rows)
    found.update(state.tail.tobytes())
    return found.hexdigest()
