"""Stored runs as a tree of shared beginnings: stretches of tokens that branch at the token where prompts differ.

A run begins where a page does, so two runs may hold the same tokens before the first that differs. Here these tokens
are one stretch. Stretches also end where a run ends, since a question or an answer ends there. Snapshots of recurrent
state hold no tokens of their own. Each belongs to the stretch that contains its position or ends at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import TokenIds, common_length
from keepwarm.store.admin.listing import Node

_Key = tuple[str, frozenset[bytes]]  # model, salts: KV under different ones is never shared


@dataclass(frozen=True)
class Stretch:
    """Tokens from position `start` on, held by one or more runs."""

    id: str
    parent: str | None
    start: int
    tokens: TokenIds
    runs: tuple[Node, ...]  # runs that hold any of it; the first one represents it
    prompts: int  # stored prompts that begin with it: the ends of branches
    name: str  # of the run that ends here
    snapshots: tuple[Node, ...] = ()  # of the recurrent state behind some of these tokens

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Its share of the runs' bytes."""
        shares = (
            node.entry.bytes * (min(self.end, _end(node)) - max(self.start, node.entry.start)) / node.entry.tokens
            for node in self.runs
        )
        return round(sum(shares))


@dataclass(eq=False)
class _Place:
    """A stretch while the tree is built."""

    key: _Key
    start: int
    tokens: TokenIds
    parent: _Place | None
    children: list[_Place] = field(default_factory=list)
    runs: list[Node] = field(default_factory=list)
    snapshots: list[Node] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def beginnings(nodes: Iterable[Node], tokens_of: Callable[[Node], TokenIds | None]) -> list[Stretch]:
    """Return the tree of some runs, each stretch after its parent. A run is left out when its tokens are not known,
    because it was just removed or its file is damaged. The runs that continue it begin a tree of their own."""
    roots: list[_Place] = []
    ends: dict[str, _Place] = {}
    nodes = list(nodes)
    kv = [node for node in nodes if node.entry.kind != "snapshot"]
    for node in sorted(kv, key=lambda node: (node.entry.start, node.entry.created, node.entry.id)):
        tokens = tokens_of(node)
        if tokens is None or not len(tokens):
            continue
        above = ends.get(node.parent or "")
        while above is not None and above.start >= node.entry.start:
            above = above.parent
        ends[node.entry.id] = _entered(roots, above, node, tokens)
    for node in nodes:
        if node.entry.kind == "snapshot":
            _noted(ends.get(node.parent or ""), node)
    return [*_stretches(roots)]


def _entered(roots: list[_Place], above: _Place | None, node: Node, tokens: TokenIds) -> _Place:
    """Enter a run's tokens, which start in the place `above` or at its end. Return the place in which the run ends."""
    key = (node.entry.model, node.salts)
    at = node.entry.start
    if above is not None and at < above.end:
        common = common_length(above.tokens[at - above.start :], tokens) if above.key == key else 0
        if at + common < above.end:
            _split(roots, above, at + common)
            above = above.parent
            assert above is not None
        if common:
            above.runs.append(node)
        at, tokens = at + common, tokens[common:]
    while len(tokens):
        siblings = roots if above is None else above.children
        alike = (each for each in siblings if each.key == key and each.start == at and each.tokens[0] == tokens[0])
        found = next(alike, None)
        if found is None:
            found = _Place(key, at, tokens, above)
            siblings.append(found)
        common = common_length(found.tokens, tokens)
        if common < len(found.tokens):
            found = _split(roots, found, at + common)
        found.runs.append(node)
        above, at, tokens = found, at + common, tokens[common:]
    assert above is not None
    return above


def _noted(place: _Place | None, snapshot: Node) -> None:
    """Note a snapshot at the place that contains its position; `place` is where the run that it stands on ends."""
    while place is not None and place.start >= snapshot.entry.end:
        place = place.parent
    if place is not None:
        place.snapshots.append(snapshot)


def _split(roots: list[_Place], place: _Place, at: int) -> _Place:
    """Split a place at a position. The place keeps the lower part; the upper one is returned."""
    upper = _Place(place.key, place.start, place.tokens[: at - place.start], place.parent, [place])
    upper.runs = [node for node in place.runs if node.entry.start < at]
    siblings = roots if place.parent is None else place.parent.children
    siblings[siblings.index(place)] = upper
    place.parent, place.start, place.tokens = upper, at, place.tokens[at - place.start :]
    place.runs = [node for node in place.runs if _end(node) > at]
    return upper


def _end(node: Node) -> int:
    return node.entry.start + node.entry.tokens


def _stretches(roots: Sequence[_Place]) -> Iterable[Stretch]:
    """Yield the places from the roots down, without recursion: a conversation may be thousands of levels deep."""
    waiting: list[tuple[_Place, str | None]] = [(place, None) for place in roots]
    found: list[tuple[_Place, str, str | None]] = []
    for place, above in waiting:
        own = f"{_spoken_of(place)[0].entry.id}.{place.start}"
        found.append((place, own, above))
        waiting += [(child, own) for child in place.children]
    prompts: Counter[str] = Counter()
    for place, own, above in reversed(found):
        prompts[own] += not place.children
        if above is not None:
            prompts[above] += prompts[own]
    for place, own, above in found:
        names = (node.entry.name for node in place.runs if node.entry.name and _end(node) == place.end)
        states = tuple(sorted(place.snapshots, key=lambda node: node.entry.end))
        yield Stretch(own, above, place.start, place.tokens, _spoken_of(place), prompts[own], next(names, ""), states)


def _spoken_of(place: _Place) -> tuple[Node, ...]:
    """Return the runs of a place: those that hold its start first, then named ones, then those stored earlier."""

    def order(node: Node) -> tuple[bool, bool, float]:
        return node.entry.start > place.start, not node.entry.name, node.entry.created

    return tuple(sorted(place.runs, key=order))


def _last_used(node: Node) -> float:
    return node.entry.last_used


def latest(nodes: Mapping[str, Node], most: int, used: Callable[[Node], float] = _last_used) -> list[Node]:
    """Return at most `most` runs: those used last, each with the runs that it continues. If there is no room for all of
    these, those nearest to it are taken. The tree then begins within the conversation.

    `used` returns when a run was used, as precisely as the caller may know it. Of equal ones the longest prompt comes
    first, then they are ordered by their ids: the order of `nodes` may reveal more than the caller may know.
    """
    kept: dict[str, Node] = {}
    for node in sorted(nodes.values(), key=lambda node: (-used(node), -_end(node), node.entry.id)):
        at: Node | None = node
        while at is not None and at.entry.id not in kept and len(kept) < most:
            kept[at.entry.id] = at
            at = nodes.get(at.parent or "")
        if len(kept) >= most:
            break
    return list(kept.values())
