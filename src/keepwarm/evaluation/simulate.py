"""Replaying request traces: which share of the tokens asked for would have been found, by policy, capacity and fleet.

The caches are the RAM tier's own code (`store.memory.RamTier`: its index, its chains, its policies of
`store.eviction`); only what it holds is simulated: runs that have names and sizes, and no KV. The optimum is Belady's
for single blocks: what is asked for again last goes first. A parent is always asked for no later than its child, so
that order keeps chains whole, and with blocks of one size no policy can find more.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.evaluation.traces import Trace
from keepwarm.store.eviction import PolicyName, policy
from keepwarm.store.format import Run
from keepwarm.store.memory import RamTier

Fleet = Literal["local", "routed", "shared"]
POLICIES: tuple[PolicyName, ...] = ("lru", "lfu", "s3fifo")
OPTIMUM = "belady"

_ROOT = -1
_MATCH = 0.5  # share of a prompt that must be known somewhere for the router to follow it
_OVERLOAD = 1.5  # times the mean load, beyond which a replica gets no more for its prefixes' sake
_DECAY = 0.5  # of loads, each time as many requests were routed as there are replicas, times 32


@dataclass(frozen=True)
class Outcome:
    """One replay."""

    trace: str
    fleet: str
    replicas: int
    policy: str
    share: float  # capacity of the whole fleet, as a share of all distinct blocks
    blocks: int  # the same in blocks
    hit_rate: float  # share of prompt tokens found
    requests: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Block(NamedTuple):
    id: int
    ordinal: int
    parent_prefix: int
    start: int = 0
    end: int = 0
    salts: tuple[bytes, ...] = ()

    @property
    def parent(self) -> int:
        return self.parent_prefix


class _Run:
    """As much of a `store.format.Run` as the RAM tier's books look at. A block's size is 1."""

    __slots__ = ("blocks", "id", "nbytes", "parent", "start")
    tokens: ClassVar[TokenIds] = token_ids([])

    def __init__(self, run_id: str, parent: int, start: int, fresh: Sequence[int]) -> None:
        self.id = run_id
        self.parent = parent
        self.start = start
        self.nbytes = len(fresh)
        above = parent
        blocks = []
        for ordinal, node in enumerate(fresh):
            blocks.append(_Block(node, ordinal, above))
            above = node
        self.blocks = blocks


class Cache:
    """One replica's cache: the RAM tier with runs that have no KV."""

    def __init__(self, name: PolicyName, capacity: int) -> None:
        self._tier = RamTier(capacity, policy=policy(name, capacity))
        self._made = 0

    def serve(self, chain: Sequence[int]) -> int:
        """Answer one prompt: returns how many of its blocks were found, notes their use and stores the others."""
        find = cast("Callable[[int], tuple[_Run, _Block] | None]", self._tier.find)
        known, limit, middle = 0, len(chain), len(chain) - 1
        while known < limit:  # as `store.chains` does: a child is never there without its parent
            if find(chain[middle]) is not None:
                known = middle + 1
            else:
                limit = middle
            middle = (known + limit) // 2
        above = chain[known - 1] if known else _ROOT
        at = above
        while (held := find(at)) is not None:  # the far end first: what stands on nothing goes last
            self._tier.touch(held[0].id)
            at = held[0].parent
        if known < len(chain):
            self._made += 1
            self._tier.put(cast("Run", _Run(str(self._made), above, known, chain[known:])))
        return known


class Router:
    """Sends a prompt where most of its beginning was served last, unless too little is known or that replica is busy
    (as the routers of serving engines do: it keeps books of its own and does not ask the caches)."""

    def __init__(self, replicas: int, distinct: int) -> None:
        self._owner = array("h", bytes(2 * distinct))  # replica + 1 that served a node last
        self._loads = np.zeros(replicas)
        self._routed = 0

    def route(self, chain: Sequence[int]) -> int:
        known, limit, middle = 0, len(chain), len(chain) - 1
        while known < limit:
            if self._owner[chain[middle]]:
                known = middle + 1
            else:
                limit = middle
            middle = (known + limit) // 2
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


def replay(trace: Trace, fleet: Fleet, replicas: int, name: PolicyName, share: float) -> Outcome:
    """Replay a trace over a fleet whose caches hold together `share` of all distinct blocks.

    `local`: requests are dealt out in turn, each replica has a cache of its own. `routed`: the same caches behind a
    router that looks at prefixes. `shared`: one cache of the same total size, which all replicas reach.
    """
    started = time.perf_counter()
    total = max(1, round(trace.distinct * share))
    count = 1 if fleet == "shared" else replicas
    caches = [Cache(name, max(1, total // count)) for _ in range(count)]
    router = Router(replicas, trace.distinct) if fleet == "routed" else None
    hit = 0
    for number in range(len(trace)):
        chain = trace.chain(number)
        at = router.route(chain) if router is not None else number % count
        hit += min(caches[at].serve(chain) * trace.block, trace.lengths[number])
    seconds = time.perf_counter() - started
    return Outcome(trace.name, fleet, replicas, name, share, total, hit / trace.tokens, len(trace), seconds)


def optimum(trace: Trace, share: float) -> Outcome:
    """What no policy can exceed with one cache for all: Belady's choice, block by block, knowing the future."""
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
    hit = 0
    for number in range(len(trace)):
        first = trace.bounds[number]
        chain = trace.chain(number)
        known = next((depth for depth, node in enumerate(chain) if node not in held), len(chain))
        hit += min(known * trace.block, trace.lengths[number])
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
    return Outcome(trace.name, "shared", 1, OPTIMUM, share, capacity, hit / trace.tokens, len(trace), seconds)


def simulate(
    trace: Trace,
    *,
    shares: Sequence[float],
    policies: Sequence[PolicyName] = POLICIES,
    fleets: Sequence[Fleet] = ("shared",),
    replicas: Sequence[int] = (1,),
    jobs: int = 1,
) -> Iterable[Outcome]:
    """Every combination, and the optimum for every capacity, as they are done. A fleet of one is simulated once."""
    work: list[Callable[[], Outcome]] = [partial(optimum, trace, share) for share in shares]
    for count in replicas:
        for fleet in fleets if count > 1 else fleets[:1]:
            work += [partial(replay, trace, fleet, count, name, share) for share in shares for name in policies]
    if jobs == 1:
        yield from (each() for each in work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in [pool.submit(each) for each in work]:
            yield future.result()
