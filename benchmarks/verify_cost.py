"""What verification costs of a hit from disk: checksums, token ids and header of a 3,000-token prefix.

    python benchmarks/verify_cost.py [--tokens 3000] [--dtype float32] [--floor-ms 58] [--rounds 9] [--out FILE]

Stores a prefix of SmolLM2-135M's KV shape and loads it as an engine does, pages dropped from the system's cache before
each time or not, with verification and without, in turns: from the page cache by the compiled reader (built without its
hashing for this comparison), from cold pages by the store's threads. The cost is the median of the paired differences;
the share is of the time to first token, taken as load time plus `--floor-ms`: the forward pass of the last step
(`benchmarks/ttft.py`). Prints one JSON line per case. Encrypted, authentication cannot be left out: the time of such
a load is given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.reads import Arriving, ReadCached
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.store import Archive
from keepwarm.store.runfile import reader as reading
from keepwarm.testing.kv import MemoryKV, blocks_of, namespace, prompt


class Later(MemoryKV):
    """Asks for each layer in turn, as an arena does."""

    arriving: Arriving

    def defer(self, arriving: Arriving) -> bool:
        self.arriving = arriving
        return True


def unverified(keys: Bytes, values: Bytes) -> bytes:
    """In place of `block_checksum`: equal to everything, at no cost."""
    return Anything()


class Anything(bytes):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class Stored:
    """A stored prefix, and memory to load it into."""

    def __init__(self, folder: Path, geometry: KVGeometry, tokens: int, step: int, key: bytes | None) -> None:
        self.tokens = prompt(tokens)
        self.folder = folder
        self.blocks = blocks_of(self.tokens, step)
        self.source = MemoryKV.random(geometry, tokens)
        self.sink = Later(geometry, tokens)
        for pair in self.sink.arrays:
            for array in pair:
                array.fill(1)  # touched, as an engine's arena is
        self.archive = Archive.open(folder, max_ram=0, max_disk=1 << 32, key=key)
        self.archive.put(self.source, self.blocks, namespace())
        self.archive.flush()
        self.load(False, cached_reads())
        assert self.sink.same(self.source, 0, tokens)

    def load(self, cold: bool, read: ReadCached | None) -> float:
        """Milliseconds from lookup to the last layer."""
        if cold:
            for path in (self.folder / "runs").iterdir():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        started = time.perf_counter()
        refs = self.archive.lookup([block.exact for block in self.blocks])
        self.archive.load(refs, self.tokens, len(self.tokens), self.sink)
        for layer in range(len(self.sink.arrays)):
            self.sink.arriving.ready(layer, read)
        return (time.perf_counter() - started) * 1e3

    def header_ms(self) -> float:
        """Milliseconds to read and check the header and token ids."""
        (path,) = (self.folder / "runs").iterdir()
        started = time.perf_counter()
        with reading.RunReader.open(path, path.stem) as reader:
            np.array_equal(reader.header.tokens, self.tokens)
        return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--step", type=int, default=1024, help="tokens per block")
    parser.add_argument("--floor-ms", type=float, default=58.0, help="what follows the load until the first token")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="the JSON lines go into this file, too")
    parser.add_argument("--folder", type=Path, help="where to store; a temporary folder when left out")
    options = parser.parse_args()
    geometry = KVGeometry.uniform(30, 3, 64, options.dtype)
    lines = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain = Stored(Path(folder) / "plain", geometry, options.tokens, options.step, None)
        sealed = Stored(Path(folder) / "sealed", geometry, options.tokens, options.step, bytes(range(32)))
        header = statistics.median(plain.header_ms() for _ in range(options.rounds))
        for cold in (True, False):
            verified, bare, encrypted = [], [], []
            for _ in range(options.rounds):
                verified.append(plain.load(cold, cached_reads()))
                with mock.patch.object(reading, "block_checksum", unverified):
                    bare.append(plain.load(cold, cached_reads("UNVERIFIED")))
                encrypted.append(sealed.load(cold, cached_reads()))
            load = statistics.median(verified)
            cost = statistics.median(a - b for a, b in zip(verified, bare, strict=True)) + header
            line = {
                "benchmark": "verify_cost",
                "tokens": options.tokens,
                "dtype": options.dtype,
                "bytes": options.tokens * geometry.bytes_per_token,
                "pages": "cold" if cold else "cached",
                "load_ms": round(load, 1),
                "verify_ms": round(cost, 2),
                "of_which_header_ms": round(header, 2),
                "share_of_load": round(cost / load, 3),
                "floor_ms": options.floor_ms,
                "share_of_ttft": round(cost / (load + options.floor_ms), 3),
                "encrypted_load_ms": round(statistics.median(encrypted), 1),
            }
            print(json.dumps(line), flush=True)
            lines.append(json.dumps(line) + "\n")
        plain.archive.close()
        sealed.archive.close()
    if options.out:
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
