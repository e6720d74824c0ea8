"""Why reuse ended where it did: the first difference to the nearest stored prompt, in words.

Answers, `Engine.explain` and every protocol get it from one `Misses`, which looks when the plan is made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import Block, Chain, PrefixNames, TokenIds, common_length
from keepwarm.core.cost import Costs
from keepwarm.core.identity import Namespace, differences
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.results import Miss
from keepwarm.core.schedule import PAGE_ENCODED, PAGE_TOKENS, SERIAL_TAIL, Grid, Serial
from keepwarm.core.spans import MissReason, Segment
from keepwarm.core.uncached import Why
from keepwarm.errors import StoreError
from keepwarm.linker.order import reordered, tools_around
from keepwarm.linker.recall import followed

_AROUND = 12  # tokens of text shown before and after a difference
_LOOKED_AT = 8  # stored blocks to check after one, besides those nearest to the prompt: an answer waits for no more
_BLOCKS_LOOKED_AT = 64  # under scheduled arithmetic, where the nearest ones are not known

_CURES = {
    "weights": "the model's weights changed",
    "config": "the model's configuration changed",
    "dtype": "it was computed in another dtype",
    "quantization": "the weights are quantized otherwise",
    "rope": "the rotary parameters changed",
    "tokenizer": "the tokenizer changed",
    "buffers": "tensors that the model computes when it is made (rotary frequencies, scales) were changed",
    "lora": "other LoRA adapters are active",
    "kv_layout": "it was stored in another layout",
    "codec": "it was stored with another codec",
}
_SAME_OR_NOT = "the model's weights changed, or are the same ones in another dtype"
_EVICTED = {
    MissReason.EVICTED: "it was stored, and evicted for space: raise max_ram or max_disk, or pin it",
    MissReason.EXPIRED: "it was stored, and its time to live ended: raise store_ttl, or retain it longer",
    MissReason.CORRUPT: "it was stored, but its bytes failed verification: it is computed again",
}
_DECIDED = {  # by the linker, whatever is stored
    MissReason.OFF: "reuse is off: every request is computed",
    MissReason.SLOWER: "the rest is in a tier from which loading it takes longer than computing it",
    MissReason.STATE: "the tokens that follow are stored, but no snapshot of the model's recurrent state reaches "
    "this far. This request computes from the snapshot before, and takes one here; the next request continues from it",
    MissReason.STEP: "the model's own kernels compute in steps, and the last step is always computed: reuse ends with "
    "a whole step, a message, or a part that is given by itself (segments=, a document)",
    MissReason.DIVERGED: "chunks were found, and would change the answer more than max_divergence allows",
    MissReason.CORRUPT: _EVICTED[MissReason.CORRUPT],
}
_SERIAL = (
    "the model computes token by token, so a prompt is cut once, near its end: reuse ends there. Another prompt "
    "that begins alike continues from there only when it is cut at the same place (before a segment, or a message, of "
    f"at most {SERIAL_TAIL} tokens at its end)"
)
_NOT_LOST = (
    MissReason.NEW,
    MissReason.OFF,
    MissReason.STEP,
    MissReason.UNCACHEABLE,
)  # it was never stored, or it could not be shared
_CHANGED = {
    MissReason.MODEL: "model",
    MissReason.SALT: "salt",
    MissReason.CUTS: "cuts",
    MissReason.ARITHMETIC: "arithmetic",
    MissReason.TEMPLATE: "template",
    MissReason.EVICTED: "evicted",
    MissReason.EXPIRED: "expired",
    MissReason.CORRUPT: "corrupt",
    MissReason.QUANTIZED: "codec",
}
_ORDER = (
    "only the order of {} differs from the nearest stored prompt, and the model is shown them as they are sent: send "
    "them in one order, register them as a set, or, in Python, ask for tool_order='sorted'"
)


class DiagnosticIndex(BlockIndex, Protocol):
    """An index that can also find the same tokens under other names, and says why blocks are gone."""

    def find_content(self, content: bytes) -> list[dict[str, Any]]:
        """Stored blocks with these tokens, each with `namespace` (described), `prefix` and `start`."""
        ...

    def eviction_reason(self, block_id: bytes) -> str | None:
        """Why a block is no longer stored: a `MissReason`'s value; None when that was not noted."""
        ...

    def namespace_of(self, ref: BlockRef) -> Mapping[str, Any] | None:
        """The described namespace of a stored block."""
        ...


class Compiled(Protocol):
    """The attributes that are needed of a compiled prompt."""

    @property
    def tokens(self) -> TokenIds: ...

    @property
    def segments(self) -> tuple[Segment, ...]: ...

    @property
    def offsets(self) -> npt.NDArray[np.int64] | None: ...

    @property
    def text(self) -> str: ...


class Linked(Protocol):
    """The attributes that are needed of a prompt with its names."""

    @property
    def prompt(self) -> Compiled: ...

    @property
    def blocks(self) -> Chain: ...

    @property
    def names(self) -> PrefixNames: ...

    @property
    def namespace(self) -> Namespace: ...

    @property
    def grid(self) -> Grid: ...


@dataclass(frozen=True)
class _Seen:
    """A difference, before it is reported."""

    position: int
    reason: MissReason
    detail: str
    wanted: TokenIds | None = None  # the prompt's tokens from the position on
    stored: TokenIds | None = None  # those of the nearest stored prompt
    before: TokenIds | None = None  # what both have before it
    changed: str = ""  # if it does not follow from the reason


@dataclass(frozen=True)
class _Nearest:
    """The stored prompt that agrees furthest with another one."""

    ref: BlockRef  # its last block that agrees in part or as a whole
    end: int  # position up to which they agree
    parts: tuple[TokenIds, TokenIds, TokenIds] | None  # wanted, stored, before; None if one of the two just ends


class Misses:
    """Explains why a plan reuses no more. Threads may share it."""

    def __init__(
        self, index: DiagnosticIndex, decode: Callable[[Sequence[int]], str], costs: Costs, bytes_per_token: int
    ) -> None:
        self._index, self._decode = index, decode
        self._costs, self._bytes_per_token = costs, bytes_per_token

    def of(self, linked: Linked, plan: LinkPlan, beside: TokenIds | None = None) -> Miss | None:
        """Explain a plan; None when everything reusable is reused. Call this when the plan is made, so that it finds
        what the plan found. A failure of the store is reported in the record, not raised. `beside`: tokens in device
        memory, which may not be stored yet."""
        if plan.miss_reason is MissReason.NONE:
            return None
        try:
            seen = _seen(linked, self._index, plan)
        except StoreError as error:
            seen = _Seen(plan.miss_at, plan.miss_reason, f"the store does not say why: {error}")
        if seen.reason is MissReason.NEW and beside is not None:
            seen = _parted(linked.prompt.tokens, plan.miss_at, beside) or seen
        if seen.reason is MissReason.TOKENS:
            seen = self._in_order(linked, seen)
        if seen.reason in _NOT_LOST:
            return self._told(linked.prompt, seen, 0, 0)
        reachable = plan.length - 1 if linked.grid.inside else linked.blocks.last_start  # the rest is always computed
        blocks = sum(plan.miss_at < end <= reachable for end in linked.blocks.ends)
        return self._told(linked.prompt, seen, blocks, max(0, reachable - plan.miss_at))

    def uncached(self, prompt: Compiled, why: Why) -> Miss:
        """Return the record of a request that runs without the cache, for the given reason."""
        return self._told(prompt, _Seen(0, MissReason.UNCACHEABLE, why), 0, 0)

    def _in_order(self, linked: Linked, seen: _Seen) -> _Seen:
        """Return `seen`, or a difference in order if the same tools are stored in another order."""
        prompt, at = linked.prompt, seen.position
        if prompt.offsets is None or seen.stored is None:
            return seen
        tools = tools_around(prompt.text, *map(int, prompt.offsets[at]))
        if not tools:
            return seen
        nearest = np.concatenate([prompt.tokens[:at], seen.stored])
        stored = followed(nearest, linked.names, self._index, len(prompt.tokens))
        order = reordered(tools, self._decode(stored.tolist()))
        return replace(seen, detail=_ORDER.format(order), changed="order") if order else seen

    def _told(self, prompt: Compiled, seen: _Seen, blocks: int, tokens: int) -> Miss:
        inside = next((s for s in prompt.segments if s.start <= seen.position < s.end), prompt.segments[-1])
        wanted = stored = ""
        character = in_segment = None
        if seen.wanted is not None and seen.stored is not None and seen.before is not None:
            before, wanted, stored = (
                self._decode(part.tolist()) for part in (seen.before, seen.wanted[:_AROUND], seen.stored[:_AROUND])
            )
            if prompt.offsets is not None:
                character = int(prompt.offsets[seen.position][0]) + _agreeing(wanted, stored)
                in_segment = character - int(prompt.offsets[inside.start][0])
            wanted, stored = before + wanted, before + stored
        changed = inside.kind.value if seen.reason is MissReason.TOKENS else _CHANGED.get(seen.reason, "")
        return Miss(
            seen.position,
            inside.kind.value,
            seen.reason.value,
            seen.detail,
            wanted,
            stored,
            changed=seen.changed or changed,
            character=character,
            in_segment=in_segment,
            name=inside.name,
            lost_blocks=blocks,
            lost_tokens=tokens,
            lost_bytes=self._bytes_per_token * tokens,
            lost_ms=self._costs.compute_ms(tokens) if tokens else None,
        )


def _agreeing(wanted: str, stored: str) -> int:
    """Number of leading characters that two texts share, up to a token that holds only part of a character."""
    pairs = enumerate(zip(wanted, stored, strict=False))
    return next((i for i, (a, b) in pairs if a != b or a == "\ufffd"), min(len(wanted), len(stored)))


def _seen(linked: Linked, index: DiagnosticIndex, plan: LinkPlan) -> _Seen:
    tokens, at = linked.prompt.tokens, plan.miss_at
    if plan.miss_reason is not MissReason.NEW:
        told = plan.miss_reason is MissReason.STEP and isinstance(linked.grid, Serial)
        return _Seen(at, plan.miss_reason, _SERIAL if told else _DECIDED[plan.miss_reason])
    block = linked.blocks[bisect_right(linked.blocks.ends, at)]
    if (why := index.eviction_reason(block.exact)) is not None:
        return _Seen(at, MissReason(why), _EVICTED[MissReason(why)])
    standing = block.start if linked.grid.inside else _standing(plan)
    most = _LOOKED_AT if linked.grid.inside else _BLOCKS_LOOKED_AT
    nearest = _nearest(tokens, linked.names, index, standing, _beside(linked, index, plan, block), most)
    theirs = (index.namespace_of(nearest.ref) or {}) if nearest is not None else {}
    mine = linked.namespace.describe()
    if nearest is not None and nearest.end > at and (nearest.parts is None or nearest.end >= block.end):
        return _Seen(at, *_kept_back(theirs, mine, by_cuts=not linked.grid.inside))
    for each in _paged(block, linked):
        if elsewhere := _elsewhere(each, linked, index):
            return _Seen(at, *elsewhere)
    if nearest is None or nearest.parts is None:
        detail = "nothing stored begins like this prompt" if at == 0 else "nothing stored continues here: it is new"
        return _Seen(at, MissReason.NEW, detail)
    if "template" in theirs and "template" in mine and theirs["template"] != mine["template"]:
        words = "the chat template, or a variable of it, changed"
        return _Seen(nearest.end, MissReason.TEMPLATE, words, *nearest.parts)
    return _differing(nearest.end, nearest.parts)


def _beside(linked: Linked, index: DiagnosticIndex, plan: LinkPlan, block: Block) -> Sequence[BlockRef]:
    """Return the stored blocks with the longest common beginning with the block in which reuse ended, as the plan found
    them."""
    if not linked.grid.inside or plan.miss_at == block.start:  # none has a common beginning
        return ()
    found = [ref for load in plan.loads for ref in load.refs if ref.id and ref.end > block.start]
    if found:
        return found
    # The plan did not need them: the tokens were in an arena.
    beside = index.continuing(block, linked.names.keys.get(block.start, b""))
    return () if beside is None else beside[0]


def _differing(at: int, parts: tuple[TokenIds, TokenIds, TokenIds]) -> _Seen:
    words = f"token {at} differs from the nearest stored prompt; everything after it must be computed"
    return _Seen(at, MissReason.TOKENS, words, *parts)


def _parted(tokens: TokenIds, at: int, beside: TokenIds) -> _Seen | None:
    """Return the difference at `at`, if a prompt first differs there from another one that continues."""
    if not 0 < at < len(beside) or common_length(tokens, beside) != at:
        return None
    return _differing(at, (tokens[at:], beside[at:], tokens[max(0, at - _AROUND) : at]))


def _kept_back(theirs: Mapping[str, Any], mine: Mapping[str, Any], *, by_cuts: bool) -> tuple[MissReason, str]:
    """Explain why stored blocks of the same model and tokens are not used, from the described namespaces of both.
    `by_cuts`: cuts are part of the blocks' names."""
    if changed := differences(theirs.get("arithmetic", mine["arithmetic"]), mine["arithmetic"]):
        return MissReason.ARITHMETIC, (
            f"the same tokens are stored, computed with another arithmetic ({', '.join(changed)} differ): "
            "reuse='prefix' would take them"
        )
    if mine["model"]["codec"] != "raw":
        return MissReason.QUANTIZED, (
            "the same tokens are stored with a lossy codec, which is never exact: reuse='prefix' would take them"
        )
    if by_cuts:
        return MissReason.CUTS, "the same tokens are stored, but cut elsewhere: reuse='prefix' would take them"
    return MissReason.NEW, "nothing stored continued here when the request came; the same tokens are stored by now"


def _paged(block: Block, linked: Linked) -> Iterator[Block]:
    """Yield a block, and those of engines with other pages in its place: pages are longer if KV is encoded."""
    yield block
    tokens = linked.prompt.tokens
    ends = (block.start + page for page in (PAGE_TOKENS, PAGE_ENCODED)) if linked.grid.inside else ()
    for end in ends:
        if end != block.end and end <= len(tokens):
            yield block._replace(end=end, tokens=tokens[block.start : end], prefix=linked.names.at(end))


def _elsewhere(block: Block, linked: Linked, index: DiagnosticIndex) -> tuple[MissReason, str] | None:
    """Find the same tokens under another salt or model.

    A request under a salt learns what is stored under its own salt or none, but not whether another tenant stored the
    same tokens.
    """
    there = [
        found
        for found in index.find_content(block.content)
        if found["start"] + found["length"] == block.end and "purpose" not in found["namespace"]
    ]
    if not there:
        return None
    mine = linked.namespace.describe()
    public = PrefixNames(linked.prompt.tokens, linked.namespace).at(block.end)  # without any salt
    salted = block.prefix != public
    models = [differences(found["namespace"]["model"], mine["model"]) for found in there]
    for found, model in zip(there, models, strict=True):
        other = found["prefix"] == public if salted else found["prefix"] != block.prefix
        if not model and block.start == 0 and other:
            return MissReason.SALT, "the same tokens are stored under another salt, which is never shared"
    if models and all(models) and not salted:
        changed = min(models, key=len)
        cures = _CURES | {"weights": _SAME_OR_NOT} if "dtype" in changed else _CURES
        causes = "; ".join(cures.get(name, name) for name in changed)
        return MissReason.MODEL, f"the same tokens are stored for another model: {causes}"
    return None


def _standing(plan: LinkPlan) -> int:
    """Return where the stored block begins in which, or after which, reuse ended."""
    last = plan.loads[-1].refs[-1] if plan.loads else None
    return last.start if last is not None and last.end > plan.miss_at else plan.miss_at


def _nearest(
    tokens: TokenIds,
    names: PrefixNames,
    index: BlockIndex,
    start: int,
    beside: Sequence[BlockRef] = (),
    most: int = _BLOCKS_LOOKED_AT,
    *,
    inside: bool = False,
) -> _Nearest | None:
    """Find the stored prompt that agrees furthest with `tokens` after `tokens[:start]`. None when nothing is stored
    there. `inside`: `start` lies inside a page. The blocks `beside` are checked wherever they begin, then `most`
    others."""
    found: _Nearest | None = None
    while start < len(tokens):
        best: tuple[BlockRef, TokenIds] | None = None
        agreed = (-1, False)
        parts: set[int] = set()  # positions where parts of blocks end: the rest of a page may follow there
        others = index.children(names.opening(start), inside=inside, most=most)
        for ref in {ref.id: ref for ref in (*(near for near in beside if near.start == start), *others)}.values():
            stored = index.token_ids(ref)
            if stored is None:
                continue
            common = common_length(stored, tokens[start:])
            parts |= {start + common} if 0 < common < min(len(stored), len(tokens) - start) else set()
            if (agrees := (common, len(stored) > common)) > agreed:  # of equal ones, prefer one that continues
                best, agreed = (ref, stored), agrees
        if best is None:
            break
        ref, stored = best
        end = start + agreed[0]
        deeper = [
            each for at in parts if (each := _nearest(tokens, names, index, at, beside, most, inside=True)) is not None
        ]
        if deeper and (furthest := max(deeper, key=lambda each: each.end)).end > end:
            return furthest
        if agreed[1] and end < len(tokens):
            before = tokens[max(0, end - _AROUND) : end]
            return _Nearest(ref, end, (tokens[end:], stored[agreed[0] :], before))
        found = _Nearest(ref, end, None)
        start, inside = end, False
    return found
