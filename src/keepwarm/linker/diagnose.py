"""Why reuse ended where it did: the first difference to the nearest stored prompt, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import Block, PrefixNames, TokenIds, common_length
from keepwarm.core.identity import Namespace, differences
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.results import Miss
from keepwarm.core.spans import MissReason, Segment

_AROUND = 12  # tokens of text shown before and after a difference

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
_DEPARTED = {
    MissReason.EVICTED: "it was stored, and given up for space: raise max_ram or max_disk, or pin it",
    MissReason.EXPIRED: "it was stored, and its time to live ended: raise store_ttl, or retain it longer",
    MissReason.CORRUPT: "it was stored, but its bytes failed verification: it is computed again",
}
_CHANGED = {
    MissReason.MODEL: "model", MissReason.SALT: "salt", MissReason.CUTS: "cuts", MissReason.ARITHMETIC: "arithmetic",
    MissReason.TEMPLATE: "template", MissReason.EVICTED: "evicted", MissReason.EXPIRED: "expired",
    MissReason.CORRUPT: "corrupt",
}  # fmt: skip


class DiagnosticIndex(BlockIndex, Protocol):
    """An index that also knows the same tokens under other names, and what is no longer there."""

    def find_content(self, content: bytes) -> list[dict[str, Any]]:
        """Stored blocks with these tokens, each with `namespace` (described), `prefix` and `start`."""
        ...

    def departed(self, block_id: bytes) -> str | None:
        """Why a block that was stored is not any more: a `MissReason`'s value; None when nobody noted it."""
        ...

    def namespace_of(self, ref: BlockRef) -> Mapping[str, Any] | None:
        """The described namespace a stored block is under."""
        ...


class Compiled(Protocol):
    """What is asked of a compiled prompt."""

    @property
    def tokens(self) -> TokenIds: ...

    @property
    def segments(self) -> tuple[Segment, ...]: ...

    @property
    def offsets(self) -> npt.NDArray[np.int64] | None: ...


@dataclass(frozen=True)
class _Seen:
    """A difference, before it is told."""

    position: int
    reason: MissReason
    detail: str
    wanted: TokenIds | None = None  # the prompt's tokens from the position on
    stored: TokenIds | None = None  # those of the nearest stored prompt
    before: TokenIds | None = None  # what both have before it


def diagnose(
    prompt: Compiled,
    blocks: Sequence[Block],
    names: PrefixNames,
    namespace: Namespace,
    index: DiagnosticIndex,
    plan: LinkPlan,
    decode: Callable[[Sequence[int]], str],
) -> Miss | None:
    """The first difference; None when everything that can be reused is."""
    if plan.miss_reason is MissReason.NONE:
        return None
    seen = _seen(prompt.tokens, blocks, names, namespace, index, plan)
    inside = next((s for s in prompt.segments if s.start <= seen.position < s.end), prompt.segments[-1])
    wanted = stored = ""
    character = in_segment = None
    if seen.wanted is not None and seen.stored is not None and seen.before is not None:
        before, wanted, stored = (
            decode(part.tolist()) for part in (seen.before, seen.wanted[:_AROUND], seen.stored[:_AROUND])
        )
        if prompt.offsets is not None:
            character = int(prompt.offsets[seen.position][0]) + _agreeing(wanted, stored)
            in_segment = character - int(prompt.offsets[inside.start][0])
        wanted, stored = before + wanted, before + stored
    # The last step is always computed, and what nobody stored is not lost.
    lost = [] if seen.reason is MissReason.NEW else [b for b in blocks[:-1] if b.end > plan.miss_at]
    return Miss(
        seen.position,
        inside.kind.value,
        seen.reason.value,
        seen.detail,
        wanted,
        stored,
        changed=inside.kind.value if seen.reason is MissReason.TOKENS else _CHANGED.get(seen.reason, ""),
        character=character,
        in_segment=in_segment,
        name=inside.name,
        lost_blocks=len(lost),
        lost_tokens=sum(block.length for block in lost),
    )


def _agreeing(wanted: str, stored: str) -> int:
    """Number of leading characters that two texts share, as far as tokens that hold part of one can be told apart."""
    pairs = enumerate(zip(wanted, stored, strict=False))
    return next((i for i, (a, b) in pairs if a != b or a == "\ufffd"), min(len(wanted), len(stored)))


def _seen(
    tokens: TokenIds,
    blocks: Sequence[Block],
    names: PrefixNames,
    namespace: Namespace,
    index: DiagnosticIndex,
    plan: LinkPlan,
) -> _Seen:
    at = plan.miss_at
    block = next(b for b in blocks if b.end > at)
    if plan.miss_reason is not MissReason.NEW:  # the linker's own decision: reuse is off, or loading is slower
        words = {MissReason.SLOWER: "the rest is in a tier from which loading it takes longer than computing it"}
        return _Seen(at, plan.miss_reason, words.get(plan.miss_reason, "reuse is off: every request is computed"))
    if (why := index.departed(block.exact)) is not None:
        return _Seen(at, MissReason(why), _DEPARTED[MissReason(why)])
    public = PrefixNames(tokens, namespace).at(block.end)
    if elsewhere := _elsewhere(block, index.find_content(block.content), namespace, public):
        return _Seen(at, *elsewhere)
    nearest, stored, common = _nearest(tokens, names, index, at)
    if nearest is not None and stored is not None and common < len(stored):
        position = at + common
        if position >= len(tokens):
            return _Seen(at, MissReason.CUTS, "the prompt ends inside a stored block: cut it there to share it")
        before = tokens[max(0, position - _AROUND) : position]
        parts = tokens[position:], stored[common:], before
        theirs = (index.namespace_of(nearest) or {}).get("template")
        mine = namespace.describe().get("template")
        if theirs and mine and theirs != mine:
            return _Seen(position, MissReason.TEMPLATE, "the chat template, or a variable of it, changed", *parts)
        return _Seen(
            position,
            MissReason.TOKENS,
            f"token {position} differs from the nearest stored prompt; everything after it must be computed",
            *parts,
        )
    if nearest is not None:
        return _Seen(
            at, MissReason.CUTS, "the same tokens are stored, but cut elsewhere: reuse='prefix' would take them"
        )
    detail = "nothing stored begins like this prompt" if at == 0 else "nothing stored continues here: it is new"
    return _Seen(at, MissReason.NEW, detail)


def _elsewhere(
    block: Block, same: Sequence[Mapping[str, Any]], namespace: Namespace, public: bytes
) -> tuple[MissReason, str] | None:
    """The same tokens under another identity, arithmetic or salt.

    `public` is the block's prefix name without any salt. Who asks under a salt learns of what is stored under his own
    or under none, not whether another tenant has stored the same.
    """
    mine = namespace.describe()
    there = [found for found in same if found["start"] == block.start and "purpose" not in found["namespace"]]
    models = [differences(found["namespace"]["model"], mine["model"]) for found in there]
    for found, model in zip(there, models, strict=True):
        changed = differences(found["namespace"]["arithmetic"], mine["arithmetic"])
        if not model and changed and found["prefix"] == block.prefix:
            return MissReason.ARITHMETIC, (
                f"the same tokens are stored, computed with another arithmetic ({', '.join(changed)} differ): "
                "reuse='prefix' would take them"
            )
    salted = block.prefix != public
    for found, model in zip(there, models, strict=True):
        other = found["prefix"] == public if salted else found["prefix"] != block.prefix
        if not model and block.start == 0 and other:
            return MissReason.SALT, "the same tokens are stored under another salt, which is never shared"
    if models and all(models) and not salted:
        causes = "; ".join(_CURES.get(name, name) for name in min(models, key=len))
        return MissReason.MODEL, f"the same tokens are stored for another model: {causes}"
    return None


def _nearest(
    tokens: TokenIds, names: PrefixNames, index: BlockIndex, at: int
) -> tuple[BlockRef | None, TokenIds | None, int]:
    """The stored block that shares most tokens with the prompt from `at` on, its token ids, and how many it shares."""
    best: tuple[BlockRef | None, TokenIds | None] = None, None
    most = -1
    for ref in index.children(names.opening(at)):
        stored = index.token_ids(ref)
        if stored is None:
            continue
        common = common_length(stored, tokens[at:])
        if common > most:
            best, most = (ref, stored), common
    return *best, max(most, 0)
