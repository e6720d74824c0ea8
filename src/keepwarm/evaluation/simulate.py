"""Replay request traces: which share of the prompt tokens a cache would have found, by policy, capacity and fleet.

The caches are the RAM tier's own code (`evaluation.caches`). By default prompts are matched as the engine does under
invariant arithmetic, to the first token that differs; `match="blocks"` takes the trace's blocks whole.

The optimum is Belady's for single blocks: it evicts first what is asked for again last. A parent is always asked for no
later than its child, so this order keeps chains whole, and with blocks of one size no policy can find more. For matches
to the token it is an upper bound: what was known of an incomplete block takes no room there.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np

from keepwarm.evaluation.caches import BlockCache, Cache, TokenCache, leading
from keepwarm.evaluation.traces import UNKNOWN, Trace
from keepwarm.store.eviction import PolicyName

Fleet = Literal["local", "routed", "shared"]
Match = Literal["tokens", "blocks"]
POLICIES: tuple[PolicyName, ...] = ("lru", "lfu", "s3fifo")
OPTIMUM = "belady"

_CACHES: dict[Match, Callable[[PolicyName, int, int], Cache]] = {"tokens": TokenCache, "blocks": BlockCache}
_MATCH = 0.5  # share of a prompt that must be known somewhere for the router to follow it
_OVERLOAD = 1.5  # times the mean load; a replica beyond it gets no more prompts for its prefixes
_DECAY = 0.5  # factor that loads are multiplied by, after every 32 requests per replica


@dataclass(frozen=True)
class Outcome:
    """One replay."""

    trace: str
    fleet: str
    replicas: int
    policy: str
    match: Match
    share: float  # capacity of the whole fleet, as a share of all distinct blocks
    blocks: int  # that capacity in blocks
    hit_rate: float  # share of prompt tokens found
    requests: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Router:
    """Sends a prompt to the replica that last served most of its beginning, unless too little is known or that replica
    is busy. Like the routers of serving engines, it keeps its own records and does not ask the caches."""

    def __init__(self, replicas: int, distinct: int) -> None:
        self._owner = array("h", bytes(2 * distinct))  # replica + 1 that served a node last
        self._loads = np.zeros(replicas)
        self._routed = 0

    def route(self, chain: Sequence[int]) -> int:
        known = leading(self._owner.__getitem__, chain)
        replica = int(self._loads.argmin())
        if known >= _MATCH * len(chain):
            owner = self._owner[chain[known - 1]] - 1
            if self._loads[owner] <= _OVERLOAD * self._loads.mean() + len(chain):
                replica = owner
        self._loads[replica] += len(chain)
        self._routed += 1
        if self._routed % (32 * len(self._loads)) == 0:
            self._loads *= _DECAY
        for node in chain:
            self._owner[node] = replica + 1
        return replica


def replay(
    trace: Trace, fleet: Fleet, replicas: int, name: PolicyName, share: float, match: Match = "tokens"
) -> Outcome:
    """Replay a trace over a fleet whose caches hold together `share` of all distinct blocks.

    `local`: replicas take requests in turn, and each has its own cache. `routed`: the same caches behind a router that
    looks at prefixes. `shared`: one cache of the same total size, which all replicas use.
    """
    started = time.perf_counter()
    total = max(1, round(trace.distinct * share))
    count = 1 if fleet == "shared" else replicas
    caches = [_CACHES[match](name, max(1, total // count), trace.block) for _ in range(count)]
    router = Router(replicas, trace.distinct) if fleet == "routed" else None
    hit = 0
    for number in range(len(trace)):
        chain = trace.chain(number)
        at = router.route(chain) if router is not None else number % count
        hit += caches[at].serve(trace.within(number) if match == "tokens" else chain, trace.lengths[number])
    seconds = time.perf_counter() - started
    return Outcome(trace.name, fleet, replicas, name, match, share, total, hit / trace.tokens, len(trace), seconds)


def optimum(trace: Trace, share: float, match: Match = "tokens") -> Outcome:
    """Return what no policy can exceed with one cache for all: Belady's choice of blocks, which knows the future."""
    started = time.perf_counter()
    capacity = max(1, round(trace.distinct * share))
    never = len(trace)
    following = array("q", bytes(8 * len(trace.nodes)))
    upcoming = array("q", [never]) * trace.distinct
    for number in range(len(trace) - 1, -1, -1):
        for place in range(trace.bounds[number], trace.bounds[number + 1]):
            following[place] = upcoming[trace.nodes[place]]
            upcoming[trace.nodes[place]] = number
    held: dict[int, int] = {}  # node -> when it is asked for next
    heap: list[tuple[int, int, int]] = []
    seen: dict[int, int] = {}  # node -> the most tokens of it that were ever asked for
    hit = 0
    for number in range(len(trace)):
        first = trace.bounds[number]
        chain = trace.chain(number)
        known = next((depth for depth, node in enumerate(chain) if node not in held), len(chain))
        hit += (
            _found(trace, number, known, seen) if match == "tokens" else min(known * trace.block, trace.lengths[number])
        )
        for depth, node in enumerate(chain):
            when = following[first + depth]
            if when == never:
                held.pop(node, None)
                continue
            held[node] = when
            heappush(heap, (-when, -depth, node))
        while len(held) > capacity:
            when, _, node = heappop(heap)
            if held.get(node) == -when:
                del held[node]
    seconds = time.perf_counter() - started
    return Outcome(trace.name, "shared", 1, OPTIMUM, match, share, capacity, hit / trace.tokens, len(trace), seconds)


def _found(trace: Trace, number: int, known: int, seen: dict[int, int]) -> int:
    """Count the tokens that a match to the token finds of a prompt whose first `known` nodes are held, never the last
    token. What was `seen` of the next node counts as held, too. Notes what is seen now."""
    length, found, agrees = trace.lengths[number], 0, True
    for depth, node in enumerate(trace.within(number)):
        asked = min(trace.block, length - depth * trace.block)
        if agrees:
            part = min(seen.get(node, 0), asked)
            found += part
            agrees = part == trace.block and depth < known
        if node != UNKNOWN:
            seen[node] = max(seen.get(node, 0), asked)
    return min(found, length - 1)


def simulate(
    trace: Trace,
    *,
    shares: Sequence[float],
    policies: Sequence[PolicyName] = POLICIES,
    fleets: Sequence[Fleet] = ("shared",),
    replicas: Sequence[int] = (1,),
    match: Match = "tokens",
    jobs: int = 1,
) -> Iterable[Outcome]:
    """Yield the outcomes of every combination, and the optimum for every capacity. A fleet of one is simulated once."""
    work: list[Callable[[], Outcome]] = [partial(optimum, trace, share, match) for share in shares]
    for count in replicas:
        for fleet in fleets if count > 1 else fleets[:1]:
            work += [partial(replay, trace, fleet, count, name, share, match) for share in shares for name in policies]
    if jobs == 1:
        yield from (each() for each in work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in [pool.submit(each) for each in work]:
            yield future.result()
