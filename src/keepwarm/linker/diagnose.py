"""Why reuse ended where it did: the first difference to the nearest stored prompt, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from keepwarm.core.blocks import Block, PrefixNames, TokenIds, common_length
from keepwarm.core.identity import Namespace, differences
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockIndex
from keepwarm.core.results import Difference
from keepwarm.core.spans import MissReason, Segment

_AROUND = 12  # tokens of text shown before and after a difference

_CURES = {
    "weights": "the model's weights changed",
    "config": "the model's configuration changed",
    "dtype": "it was computed in another dtype",
    "quantization": "the weights are quantized otherwise",
    "rope": "the rotary parameters changed",
    "tokenizer": "the tokenizer changed",
    "lora": "other LoRA adapters are active",
    "kv_layout": "it was stored in another layout",
    "codec": "it was stored with another codec",
}


class DiagnosticIndex(BlockIndex, Protocol):
    """An index that also knows the same tokens under other names."""

    def find_content(self, content: bytes) -> list[dict[str, Any]]:
        """Stored blocks with these tokens, each with `namespace` (described), `prefix` and `start`."""
        ...


def diagnose(
    tokens: TokenIds,
    blocks: Sequence[Block],
    segments: Sequence[Segment],
    names: PrefixNames,
    namespace: Namespace,
    index: DiagnosticIndex,
    plan: LinkPlan,
    decode: Callable[[Sequence[int]], str],
) -> Difference | None:
    """The first difference; None when everything that can be reused is."""
    if plan.miss_reason is MissReason.NONE:
        return None
    at = plan.miss_at
    block = next(b for b in blocks if b.end > at)

    def difference(position: int, reason: MissReason, detail: str, wanted: str = "", stored: str = "") -> Difference:
        inside = next((s for s in segments if s.start <= position < s.end), segments[-1])
        return Difference(position, inside.kind.value, reason.value, detail, wanted, stored)

    if plan.miss_reason is MissReason.SLOWER:
        detail = "the rest is in a tier from which loading it takes longer than computing it"
        return difference(at, plan.miss_reason, detail)
    public = PrefixNames(tokens, namespace).at(block.end)
    if elsewhere := _elsewhere(block, index.find_content(block.content), namespace, public):
        return difference(at, *elsewhere)
    nearest, common = _nearest(tokens, names, index, at)
    if nearest is not None and common < len(nearest):
        position = at + common
        if position >= len(tokens):
            return difference(at, MissReason.CUTS, "the prompt ends inside a stored block: cut it there to share it")
        return difference(
            position,
            MissReason.TOKENS,
            f"token {position} differs from the nearest stored prompt; everything after it must be computed",
            decode(tokens[max(0, position - _AROUND) : position + _AROUND].tolist()),
            decode(nearest[max(0, common - _AROUND) : common + _AROUND].tolist()),
        )
    if nearest is not None:
        return difference(
            at, MissReason.CUTS, "the same tokens are stored, but cut elsewhere: reuse='prefix' would take them"
        )
    detail = "nothing stored begins like this prompt" if at == 0 else "nothing stored continues here: it is new"
    return difference(at, MissReason.NEW, detail)


def _elsewhere(
    block: Block, same: Sequence[Mapping[str, Any]], namespace: Namespace, public: bytes
) -> tuple[MissReason, str] | None:
    """The same tokens under another identity, arithmetic or salt.

    `public` is the block's prefix name without any salt. Who asks under a salt learns of what is stored under his own
    or under none, not whether another tenant has stored the same.
    """
    mine = namespace.describe()
    there = [found for found in same if found["start"] == block.start]
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


def _nearest(tokens: TokenIds, names: PrefixNames, index: BlockIndex, at: int) -> tuple[TokenIds | None, int]:
    """The stored block that shares most tokens with the prompt from `at` on, and how many."""
    best: TokenIds | None = None
    most = -1
    for ref in index.children(names.opening(at)):
        stored = index.token_ids(ref)
        if stored is None:
            continue
        common = common_length(stored, tokens[at:])
        if common > most:
            best, most = stored, common
    return best, max(most, 0)
