"""Finds how far the stored KV of a prompt reaches, in every group and at every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Chain, TokenIds
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import BlockRef
from keepwarm.integrations.vllm.hybrid.groups import Group, unit_of
from keepwarm.integrations.vllm.hybrid.naming import group_namespace, pages_chain, state_id
from keepwarm.store.archive import Archive

_AT_ONCE = 32  # positions whose states are looked up in one call


@dataclass(frozen=True)
class Found:
    """All that is needed to continue from `end` is stored. `refs` has it by group, then by rank: pages from the first
    token on, or only the state at `end`."""

    end: int = 0
    refs: tuple[tuple[tuple[BlockRef, ...], ...], ...] = ()

    def of(self, group: Group, start: int, end: int) -> tuple[tuple[BlockRef, ...], ...]:
        """Return, by rank, the blocks of positions `[start, end)`."""
        if group.kind == "state":
            return self.refs[group.number]
        first, last = start // group.page_size, end // group.page_size
        return tuple(refs[first:last] for refs in self.refs[group.number])


class Finder:
    """Looks prompts up. Safe for use from several threads."""

    def __init__(self, archive: Archive, namespaces: Sequence[Namespace], groups: Sequence[Group]) -> None:
        """`namespaces` are all workers' shards."""
        self._archive = archive
        self._groups = groups
        self._unit = unit_of(groups)
        self.namespaces = {
            group.number: [group_namespace(namespace, group) for namespace in namespaces] for group in groups
        }

    def find(self, tokens: TokenIds, keys: Mapping[int, bytes], variant: str) -> Found:
        """Return the longest beginning, in whole units, from whose end every rank can continue."""
        end = len(tokens) // self._unit * self._unit
        refs: dict[int, list[tuple[BlockRef, ...]]] = {}
        chains: dict[int, list[Chain]] = {}
        for group in self._groups:
            named = [pages_chain(group, names, tokens, keys, variant) for names in self.namespaces[group.number]]
            if group.kind == "state":
                chains[group.number] = named
                continue
            for pages in named:
                stored = self._archive.lookup(pages.exact[: end // group.page_size])
                refs.setdefault(group.number, []).append(stored)
                end = min(end, len(stored) * group.page_size // self._unit * self._unit)
        if chains:
            end, states = self._states(chains, end)
            refs |= states
        return Found(end, tuple(tuple(refs[group.number]) for group in self._groups)) if end else Found()

    def _states(
        self, chains: Mapping[int, Sequence[Chain]], end: int
    ) -> tuple[int, dict[int, list[tuple[BlockRef, ...]]]]:
        """Return the last position up to `end` at which every state of every rank is stored, and where they are."""
        sizes = {group.number: group.page_size for group in self._groups}
        while end:
            ends = range(end, max(end - _AT_ONCE * self._unit, 0), -self._unit)
            ids = {
                at: {
                    number: [state_id(pages.exact[at // sizes[number] - 1]) for pages in named]
                    for number, named in chains.items()
                }
                for at in ends
            }
            stored = where(self._archive, [name for each in ids.values() for named in each.values() for name in named])
            for at, each in ids.items():
                if all(name in stored for named in each.values() for name in named):
                    return at, {number: [(stored[name],) for name in named] for number, named in each.items()}
            end = ends[-1] - self._unit
        return 0, {}


def where(archive: Archive, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
    """Return the blocks that are stored, in any tier."""
    found = archive.find(ids)
    if archive.remotes and (far := [name for name in ids if name not in found]):
        found = found | archive.remotes.find(far)
    return found
