"""Write a run layer after layer, so that it need not be in memory, and its header last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.store.runfile.crypto import TAG_BYTES, RunCipher, StoreKey, new_salt
from keepwarm.store.runfile.header import Seal, authenticated, encode_header
from keepwarm.store.runfile.layout import Layout, Outline, StoredBlock, block_checksum

_CHUNK = 16 << 20  # bytes per write call


Write = Callable[[memoryview], None]


def write_run(
    fd: int, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], key: StoreKey | None = None, *, at: int = 0
) -> None:
    """Write a run's file, from byte `at` on, encrypted when a key is given.

    `layers` are keys and values, `[heads, rows, head_bytes]`; each may be overwritten when the next one is requested.

    The header is written last, over a hole: until then the file is not valid. Raises OSError, and ValueError when
    `layers` does not fit the run's geometry.
    """
    seal = _new_seal(key)
    os.lseek(fd, at + len(encode_header(run, seal=seal)) + run.tokens.nbytes, os.SEEK_SET)
    head = _write_body(lambda part: _write(fd, part), run, layers, key, seal)
    os.lseek(fd, at, os.SEEK_SET)
    _write(fd, memoryview(head))


def encode_run(
    run: Outline, layers: Iterable[tuple[Bytes, Bytes]], key: StoreKey | None = None
) -> tuple[bytes, memoryview]:
    """Return the bytes of a run's file: all up to the KV, and the KV. Raises ValueError as `write_run`."""
    body = memoryview(bytearray(Layout.of(run).nbytes))
    at = 0

    def write(part: memoryview) -> None:
        nonlocal at
        body[at : at + len(part)] = part
        at += len(part)

    return _write_body(write, run, layers, key, _new_seal(key)), body.toreadonly()


def _new_seal(key: StoreKey | None) -> Seal | None:
    return None if key is None else Seal(key.id, new_salt())


def _write_body(
    write: Write, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], key: StoreKey | None, seal: Seal | None
) -> bytes:
    """Write the KV's bytes in order. Return the header and token ids that belong before them."""
    cipher = None if key is None or seal is None else key.cipher(run.id, seal.salt)
    layout = Layout.of(run)
    checksums = b"".join(_write_layer(write, run, layout, layer, pair, cipher) for layer, pair in enumerate(layers))
    tokens = run.tokens.tobytes()
    if cipher is not None and seal is not None:
        sealed = cipher.seal_tokens(authenticated(run, checksums, seal), tokens)
        tokens, seal = sealed[:-TAG_BYTES], replace(seal, tag=sealed[-TAG_BYTES:])
    return encode_header(run, checksums, tokens, seal) + tokens


def _write_layer(
    write: Write, run: Outline, layout: Layout, layer: int, pair: tuple[Bytes, Bytes], cipher: RunCipher | None
) -> bytes:
    """Write one layer. Return its blocks' checksums, or tags."""
    expected = tuple(layout.shape(layer, kv) for kv in (0, 1))
    if tuple(part.shape for part in pair) != expected:
        raise ValueError(f"layer {layer} has {[part.shape for part in pair]}, the run's geometry says {expected}")
    parts = (
        (block, (pair[0][:, first:last], pair[1][:, first:last]))
        for block, first, last in layout.each(layer, run.blocks)
    )
    if cipher is not None:
        return b"".join(_write_sealed(write, layer, block, part, cipher) for block, part in parts)
    for plane in pair:
        write(np.ascontiguousarray(plane).reshape(-1).data)
    return b"".join(block_checksum(*part) for _, part in parts)


def _write_sealed(write: Write, layer: int, block: StoredBlock, pair: Sequence[Bytes], cipher: RunCipher) -> bytes:
    plain = np.concatenate([part.reshape(-1) for part in pair])
    sealed = memoryview(cipher.seal(layer, block.ordinal, block.start, plain.data))
    write(sealed[:-TAG_BYTES])
    return bytes(sealed[-TAG_BYTES:])


def _write(fd: int, part: memoryview) -> None:
    rest = part.cast("B")
    while rest:
        rest = rest[os.write(fd, rest[:_CHUNK]) :]
