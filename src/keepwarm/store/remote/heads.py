"""The small values of a remote tier: where a block is, a run's entry in the list of runs, and its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepwarm.core.ports import BlockRef
from keepwarm.errors import CorruptRun
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import RunHeader, read_header


@dataclass(frozen=True)
class Mark:
    """A run's entry in the list of runs."""

    run_id: str
    parent: str  # the run it continues, or empty
    nbytes: int  # of everything kept for it
    created: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"{self.run_id}.{self.parent or '-'}.{self.nbytes}.{int(self.created * 1e6)}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Raises ValueError."""
        run_id, parent, nbytes, created = text.split(".")
        if len(run_id) != 32 or int(nbytes) < 0:
            raise ValueError(text)
        return cls(run_id, "" if parent == "-" else parent, int(nbytes), int(created) / 1e6)


@dataclass(frozen=True)
class Whereabouts:
    """Where a block is. `above` are the runs that its run stands on, the nearest first."""

    run_id: str
    ordinal: int
    above: tuple[str, ...] = ()

    def encode(self) -> bytes:
        return b"".join((
            bytes.fromhex(self.run_id),
            self.ordinal.to_bytes(4, "little"),
            *map(bytes.fromhex, self.above),
        ))

    @classmethod
    def decode(cls, raw: bytes | None) -> Whereabouts | None:
        """Return None when the value is missing, or was not written by Keepwarm."""
        if raw is None or len(raw) < 20 or (len(raw) - 20) % 16:
            return None
        above = tuple(raw[at : at + 16].hex() for at in range(20, len(raw), 16))
        return cls(raw[:16].hex(), int.from_bytes(raw[16:20], "little"), above)


@dataclass(frozen=True)
class Head:
    """Everything of a run except its KV, verified."""

    mark: Mark
    header: RunHeader
    places: Mapping[bytes, int] = field(repr=False)  # ordinal by block id

    def ref(self, ordinal: int, tier: str) -> BlockRef:
        block = self.header.blocks[ordinal]
        return BlockRef(block.id, block.prefix, self.mark.run_id, ordinal, block.start, block.length, tier)

    @classmethod
    def parse(cls, run_id: str, raw: bytes, key: StoreKey | None) -> Head:
        """Parse the bytes of a head. Raises CorruptRun, StoreTooNew and StoreLocked."""
        line, _, rest = raw.partition(b"\n")
        try:
            text, _, size = line.decode("ascii").partition(" ")
            mark, total = Mark.parse(text), int(size)
        except ValueError as error:
            raise CorruptRun("its first line cannot be read") from error
        header = read_header(_Beginning(rest, total), key)
        if header.run_id != run_id or mark.run_id != run_id:
            raise CorruptRun(f"it is run {header.run_id}'s")
        return cls(mark, header, {block.id: block.ordinal for block in header.blocks})

    @property
    def body_bytes(self) -> int:
        return self.header.file_bytes - self.header.data_offset


class _Beginning:
    """The first bytes of something larger. A `Source` for headers."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self.size = size

    def read(self, count: int, offset: int) -> bytes:
        if offset + count > len(self._data):
            raise CorruptRun(f"it ends at {len(self._data)}")
        return self._data[offset : offset + count]

    def fill(self, offset: int, buffers: list[memoryview]) -> None:
        raise CorruptRun("only its beginning is here")


def probes(known: int, limit: int, fanout: int) -> list[int]:
    """Return the places of `[known, limit)` to ask for next: the last one, and others evenly spaced before it."""
    count = min(fanout, limit - known)
    return sorted({limit - 1 - (limit - known) * number // count for number in range(count)})


def places_in(heads: Mapping[str, Head]) -> dict[bytes, tuple[Head, int]]:
    """Return for each block the head of its run, and its ordinal there."""
    return {block_id: (head, ordinal) for head in heads.values() for block_id, ordinal in head.places.items()}
