"""Replay prompts against a vendor's cache: what is read and written, what it costs, and where prompts diverge."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from keepwarm.lint.prompt import Part, Prompt, estimated_tokens
from keepwarm.lint.rules import ModelPrice, Prices, VendorRules

_COMPARED = 64  # branches of one place that a new prompt is compared with, the latest first


@dataclass(frozen=True)
class Nearest:
    """The earlier prompt that shares most with one, and where they diverge: character `char` of part number `part`."""

    line: int
    part: int
    char: int
    other: str = ""  # that part's text in the earlier prompt; empty when it had ended


@dataclass(frozen=True)
class Outcome:
    """One request's tokens under a vendor's rules.

    `units` is what they cost, in uncached tokens; `price` is US dollars for one of these, None where it is not known.
    """

    prompt: Prompt
    tokens: int
    read: int
    written: int
    units: float
    price: float | None
    nearest: Nearest | None
    expired: bool = False  # it would have been read, but was too old


@dataclass
class _Node:
    """A part at its place in the prompts seen so far."""

    line: int = 0
    at: float | None = None
    children: dict[str, _Node] = field(default_factory=dict)


class _Tree:
    """The prompts of one cache, part by part."""

    def __init__(self) -> None:
        self.root = _Node()

    def nearest(self, parts: Sequence[Part], now: float | None = None, ttl: float = math.inf) -> Nearest | None:
        """Return the prompt that agrees longest, to the character, among those used in the last `ttl` seconds."""
        node, depth = self.root, 0
        while depth < len(parts):
            below = node.children.get(parts[depth].text)
            if below is None or not _alive(below.at, now, ttl):
                break
            node, depth = below, depth + 1
        if node is self.root and not node.children:
            return None
        best = Nearest(node.line, depth, 0)
        if depth < len(parts):
            text = parts[depth].text
            for other, child in islice(reversed(node.children.items()), _COMPARED):
                if not _alive(child.at, now, ttl):
                    break  # the others are older
                common = common_length(text, other)
                if common > best.char or not best.other:
                    best = Nearest(child.line, depth, common, other)
        return best

    def add(self, prompt: Prompt) -> None:
        node = self.root
        for part in prompt.parts:
            below = node.children.pop(part.text, None) or _Node()
            node.children[part.text] = below  # the latest stands last
            below.line, below.at = prompt.line, prompt.at
            node = below


class _Cache:
    """One cache of a vendor: of one model, and of one `prompt_cache_key`."""

    def __init__(self, rules: VendorRules, price: ModelPrice) -> None:
        self.rules = rules
        self.minimum = rules.minimum if price.minimum is None else price.minimum
        self.ttl = price.ttl_seconds or rules.ttl_seconds
        self.writes_cost = price.write is not None
        self.tree = _Tree()
        self.entries: dict[bytes, tuple[float | None, float]] = {}  # prefix → last use, lifetime (declared prefixes)

    def run(self, prompt: Prompt, ends: Sequence[int]) -> tuple[int, list[tuple[int, float]], bool]:
        """Return tokens read, tokens written with their lifetimes, and whether an entry was there but had expired.

        `ends` are the tokens up to each part's end.
        """
        if self.rules.breakpoints is None:
            return self._by_itself(prompt, ends)
        return self._declared(prompt, ends)

    def _by_itself(self, prompt: Prompt, ends: Sequence[int]) -> tuple[int, list[tuple[int, float]], bool]:
        ttl = prompt.retention or self.ttl
        read = self._shared(prompt, ends, self.tree.nearest(prompt.parts, prompt.at, ttl))
        written = []
        if self.writes_cost and ends and ends[-1] >= self.minimum:
            written = [(ends[-1] - read, ttl)]
        return read, written, not read and self._shared(prompt, ends, self.tree.nearest(prompt.parts)) > 0

    def _shared(self, prompt: Prompt, ends: Sequence[int], found: Nearest | None) -> int:
        if found is None or not ends:
            return 0
        shared = ends[found.part - 1] if found.part else 0
        if found.char:
            shared += round(prompt.scale * estimated_tokens(prompt.parts[found.part].text[: found.char]))
        shared = min(shared, ends[-1] - 1)
        if shared < self.minimum:
            return 0
        return self.minimum + (shared - self.minimum) // self.rules.increment * self.rules.increment

    def _declared(self, prompt: Prompt, ends: Sequence[int]) -> tuple[int, list[tuple[int, float]], bool]:
        points = {place: part.ttl for place, part in enumerate(prompt.parts) if part.ttl}
        if prompt.automatic and prompt.parts:
            points.setdefault(len(prompt.parts) - 1, prompt.automatic)
        points = dict(sorted(points.items())[-(self.rules.breakpoints or 0) :])
        names = _names(prompt.parts)
        hit, expired = -1, False
        for point in sorted(points, reverse=True):
            for place in range(point, max(-1, point - (self.rules.lookback_blocks or 0) - 1), -1):
                entry = self.entries.get(names[place])
                if entry is None or place <= hit:
                    continue
                if _alive(entry[0], prompt.at, entry[1]):
                    hit = place
                    break
                expired = True
        read = ends[hit] if hit >= 0 else 0
        if hit >= 0:  # a use begins the lifetime anew
            self.entries[names[hit]] = (prompt.at, self.entries[names[hit]][1])
        written: list[tuple[int, float]] = []
        reached = read
        for point, ttl in points.items():
            if ends[point] >= self.minimum and point > hit:
                written.append((ends[point] - reached, ttl))
                reached = ends[point]
            if ends[point] >= self.minimum and point >= hit:
                self.entries[names[point]] = (prompt.at, ttl)
        return read, written, expired and not read


def replay(prompts: Iterable[Prompt], prices: Prices) -> Iterator[Outcome]:
    """Yield what each prompt reads, writes and costs when they are sent in this order.

    Without times nothing expires. Prompts under different `prompt_cache_key`s are assumed to share nothing.
    """
    caches: dict[tuple[str, str, str], _Cache] = {}
    for prompt in prompts:
        rules = prices.of(prompt.vendor)
        price = rules.price(prompt.model) or ModelPrice(read=rules.read, input=None, minimum=None)
        cache = caches.setdefault((prompt.vendor, prompt.model, prompt.key), _Cache(rules, price))
        ends, total = [], 0
        for part in prompt.parts:
            total += part.tokens
            ends.append(round(total * prompt.scale))
        nearest = cache.tree.nearest(prompt.parts)
        read, written, expired = cache.run(prompt, ends)
        cache.tree.add(prompt)
        write = rules.write if price.write is None else price.write
        shares = sum(n * (rules.write_1h if ttl > rules.ttl_seconds else write) for n, ttl in written)
        tokens, fresh = (ends[-1] if ends else 0), sum(n for n, _ in written)
        units = tokens - read - fresh + shares + read * price.read
        dollars = None if price.input is None else price.input / 1e6
        yield Outcome(prompt, tokens, read, fresh, units, dollars, nearest, expired)


def common_length(a: str, b: str) -> int:
    """Return the length of two texts' common beginning, by halving: comparing slices is much faster than characters."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _alive(used: float | None, now: float | None, ttl: float) -> bool:
    return used is None or now is None or now - used <= ttl


def _names(parts: Sequence[Part]) -> list[bytes]:
    chain = hashlib.sha256()
    names = []
    for part in parts:
        text = part.text.encode("utf-8", "surrogatepass")
        chain.update(f"{part.kind}:{len(text)}:".encode() + text)
        names.append(chain.digest())
    return names
