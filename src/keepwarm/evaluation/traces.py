"""Public request traces as chains of blocks.

Two formats are read: Mooncake's (one JSON object per line: `timestamp`, `input_length`, `hash_ids`, a block is 512
tokens) and that of kv-cache-tester's coding-agent sessions (one JSON object per file: `block_size`, `requests` with
`t`, `in`, `hash_ids`, possibly nested). In them an id names a single block. Here a block's number stands for the block
and everything before it, so that equal numbers mean equal prefixes whatever the trace's ids mean.

Agent sessions name only whole blocks. The rest of a prompt is not given. It is taken as the beginning of the block that
the next request of the same conversation has there, if there is one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from keepwarm.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens
UNKNOWN = -1  # the node of a block that the trace does not name: equal to no other


@dataclass(frozen=True)
class Trace:
    """Requests in order of time. The blocks of request `i` are `nodes[bounds[i]:bounds[i + 1]]`."""

    name: str
    block: int  # tokens
    nodes: array[int]
    bounds: array[int]
    lengths: array[int]  # tokens of each prompt
    distinct: int  # nodes are below
    tails: array[int] = field(default_factory=lambda: array("q"))  # what `within` adds to each chain; empty: nothing
    answers: array[int] = field(default_factory=lambda: array("q"))  # tokens of each answer, where the trace tells them

    def __len__(self) -> int:
        return len(self.lengths)

    def chain(self, request: int) -> array[int]:
        return self.nodes[self.bounds[request] : self.bounds[request + 1]]

    def within(self, request: int) -> list[int]:
        """Return the node that each block of a prompt lies in, the last, incomplete one included."""
        count = -(-self.lengths[request] // self.block)
        nodes = self.chain(request)[:count].tolist()
        if len(nodes) < count and self.tails:
            nodes.append(self.tails[request])
        return nodes + [UNKNOWN] * (count - len(nodes))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def read(cls, *files: Path, copies: int = 1, seed: int = 0) -> Trace:
        """Read files of one format and merge them by time. `copies` plays all of it several times at once, as that many
        groups of users that share nothing, each with its own start time.

        Raises ConfigError for a file of neither format, and for files of different block sizes.
        """
        requests: list[tuple[float, int, int, list[int], int]] = []  # time, file, tokens, ids, tokens of the answer
        sizes: set[int] = set()
        for number, file in enumerate(files):
            size, found = _read(file)
            sizes.add(size)
            requests += [(when, number, tokens, ids, answer) for when, tokens, ids, answer in found]
        if len(sizes) != 1:
            raise ConfigError(f"traces replayed together need one block size, these have {sorted(sizes)}")
        requests.sort(key=lambda each: each[0])
        nodes, distinct = _chains(requests)
        name = files[0].stem if len(files) == 1 else f"{files[0].stem} and {len(files) - 1} more"
        times = np.array([each[0] for each in requests])
        lengths = [(each[2], each[4]) for each in requests]
        return cls._copied(name, sizes.pop(), nodes, times, lengths, distinct, copies, seed)

    @classmethod
    def _copied(
        cls,
        name: str,
        block: int,
        chains: list[array[int]],
        times: Any,
        lengths: list[tuple[int, int]],
        distinct: int,
        copies: int,
        seed: int,
    ) -> Trace:
        span = float(times.max() - times.min()) + 1.0
        shifts = np.random.default_rng(seed).uniform(0, span, copies)
        shifts[0] = 0.0
        order = np.argsort(
            ((times[None, :] + shifts[:, None]) % span if copies > 1 else times[None, :]).ravel(), kind="stable"
        )
        nodes, bounds, tokens, tails, answers = array("q"), array("q", [0]), array("q"), array("q"), array("q")
        own = _tails(chains)
        for place in order.tolist():
            copy, request = divmod(place, len(chains))
            first = copy * distinct
            nodes.extend(chains[request] if not first else array("q", [node + first for node in chains[request]]))
            bounds.append(len(nodes))
            tokens.append(lengths[request][0])
            answers.append(lengths[request][1])
            tails.append(own[request] + first if own[request] != UNKNOWN else UNKNOWN)
        return cls(name, block, nodes, bounds, tokens, distinct * copies, tails, answers)


def _chains(requests: Iterable[tuple[float, int, int, list[int], int]]) -> tuple[list[array[int]], int]:
    """Number every (node before, id) pair once."""
    known: dict[tuple[int, int], int] = {}
    chains: list[array[int]] = []
    for _, file, _, ids, _ in requests:
        chain = array("q")
        at = -1 - file  # ids have a meaning only within one file
        for each in ids:
            at = known.setdefault((at, each), len(known))
            chain.append(at)
        chains.append(chain)
    return chains, len(known)


def _tails(chains: Sequence[array[int]]) -> list[int]:
    """Return for each request, in order of time, the node after its last one in the next request that continues it."""
    following: dict[int, int] = {}
    tails = []
    for chain in reversed(chains):
        tails.append(following.get(chain[-1], UNKNOWN))
        following.update(pairwise(chain))
    return tails[::-1]


def _read(file: Path) -> tuple[int, list[tuple[float, int, list[int], int]]]:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the trace {file} cannot be read: {error.strerror or error}") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    try:
        if isinstance(whole, Mapping) and "requests" in whole:
            found = [
                (float(each["t"]), int(each["in"]), each["hash_ids"], int(each.get("out", 0)))
                for each in _flat(whole["requests"])
            ]
            return int(whole["block_size"]), [each for each in found if each[1] > 0 and each[2]]
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = [
            (
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                row["hash_ids"],
                int(row.get("output_length", 0)),
            )
            for row in rows
        ]
        return MOONCAKE_BLOCK, [each for each in found if each[1] > 0 and each[2]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is no trace of a known format ({type(error).__name__}: {error}): expected Mooncake's lines with "
            "timestamp, input_length and hash_ids, or an agent session with block_size and requests"
        ) from None


def _flat(requests: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for each in requests:
        if "hash_ids" in each:
            yield each
        yield from _flat(each.get("requests", ()))
