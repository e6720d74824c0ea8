"""The files in which llama-server saves slots: token ids, and behind them the state of one sequence.

The ids are a plain list, or, since images can be among them, a packed one that begins with no token. Both are read, and
plain lists are written, which every build takes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.ports import Bytes
from keepwarm.integrations.llamacpp.form import Form, Reader, Unreadable
from keepwarm.integrations.llamacpp.memory import StateSink

_MAGIC = b"qsgg"
_HEAD = 8  # bytes: the magic number and a version
_NO_TOKEN = 0xFFFFFFFF
_PACKING = 1  # version of packed lists


@dataclass(frozen=True)
class SlotFile:
    """What was read: the bytes that begin any file of this build, token ids, and the state."""

    head: bytes
    tokens: TokenIds
    state: Bytes


def read_slot(path: Path) -> SlotFile:
    """Read a saved slot. Raises Unreadable for one that is in another form or holds images, and OSError."""
    reader = Reader(np.fromfile(path, np.uint8))
    head = reader.take(_HEAD).tobytes()
    if head[:4] != _MAGIC:
        raise Unreadable("it is no file of a slot")
    (count,) = reader.numbers("I")
    ids = reader.take(4 * count).view("<u4")
    return SlotFile(head, _unpacked(ids), reader.data[reader.at :])


def _unpacked(ids: TokenIds) -> TokenIds:
    if not len(ids) or ids[0] != _NO_TOKEN:
        return token_ids(ids)
    if len(ids) < 4 or ids[1] != _PACKING or len(ids) < 4 + ids[2]:
        raise Unreadable("its token ids are packed in an unknown way")
    if ids[3 + int(ids[2])]:
        raise Unreadable("it holds images or audio, and token ids do not name those")
    return token_ids(ids[3 : 3 + int(ids[2])])


class SlotPlace:
    """A file that is to be restored into a slot. Implements `integrations.kept.Place`."""

    def __init__(self, form: Form, head: bytes, path: Path) -> None:
        self._form = form
        self._head = head
        self._path = path

    def sink(self, tokens: int, tail: Bytes) -> StateSink:
        return StateSink(self._form, tokens, bytes(_HEAD + 4 + 4 * tokens), tail)

    def put(self, data: Bytes, tokens: TokenIds) -> bool:
        """Write the file. Raises OSError."""
        head = self._head + struct.pack("<I", len(tokens)) + tokens.tobytes()
        data[: len(head)] = np.frombuffer(head, np.uint8)
        data.tofile(self._path)
        return True
