"""Makes relocated KV fit its new context: chooses the tokens to recompute, and runs passes over them alone.

The first pass runs the chosen tokens and those computed between the chunks, each at its own position. Then the other
tokens take over what that changed (`runtime.blend.carry`), and a second pass runs what follows the chunks. The passes
cost as much as the same number of rows in any pass. Choosing may need its own forward passes and is timed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from keepwarm.core.blocks import TokenIds
from keepwarm.core.plan import LinkPlan
from keepwarm.core.repair import RepairRule
from keepwarm.core.rope import Rotary
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.blend.carry import Changes
from keepwarm.runtime.blend.scatter import Positions, Rows, Watch

_ASKING = 64  # `attention` counts the attention of this many last computed rows
_ANSWERING = 8  # `impact` counts that of these last rows: the question's end and the beginning of the answer
_NEAR = (0.25, 0.5, 1.0, 0.5, 0.25)  # shares of a token's attention for its neighbours and itself, in `impact`
_MEASURED = 6  # number of layers from which divergence is estimated
_CHECKED = 1  # the layer whose values `deviation` compares: the first that depends on the context


@dataclass(frozen=True)
class Blended:
    """The result of computing a prompt with chunks to its end."""

    logits: torch.Tensor  # after the last token, `[vocab]`
    repaired: int  # relocated tokens that were recomputed
    divergence: float | None  # see `blend`
    select_ms: float
    repair_ms: float  # of the passes over chosen and computed tokens
    carry_ms: float

    def milliseconds(self) -> dict[str, float]:
        """Return the parts of the prefill's time."""
        return {"select": self.select_ms, "repair": self.repair_ms, "carry": self.carry_ms}


@dataclass(frozen=True)
class Site:
    """What a strategy chooses from."""

    plan: LinkPlan
    tokens: TokenIds
    arena: Arena
    rows: Rows
    step: int  # rows per pass
    relocated: Positions  # all relocated positions, rising
    computed: Positions  # positions between and after the chunks, rising

    def run(self, positions: Positions, **wanted: object) -> torch.Tensor | None:
        """Run rows in passes of at most `step`. A row does not depend on later ones, so the result is that of one
        pass."""
        logits = None
        for at in range(0, len(positions), self.step):
            part = positions[at : at + self.step]
            logits = self.rows.run(self.tokens[part], part, self.arena, **wanted)  # type: ignore[arg-type]
        return logits


Strategy = Callable[[Site, float], Positions]


def _none(site: Site, budget: float) -> Positions:
    return site.relocated[:0]


def _seam(site: Site, budget: float) -> Positions:
    reach = int(budget)
    near = np.zeros(site.plan.length, dtype=bool)
    for start, end in _chunks(site.plan):
        for border in (start, end):
            near[max(border - reach, 0) : border + reach] = True
    return site.relocated[near[site.relocated]]


def _leading(site: Site, budget: float) -> Positions:
    first = np.zeros(site.plan.length, dtype=bool)
    for start, end in _chunks(site.plan):
        first[start : min(start + int(budget), end)] = True
    return site.relocated[first[site.relocated]]


def _deviation(site: Site, budget: float) -> Positions:
    """Choose the tokens whose values deviate most from the cached ones, in the first layer that depends on the context.
    For this, the layers up to it are computed; their keys and values are right and are kept."""
    layer = min(_CHECKED, len(site.arena.layers) - 1)
    values = site.arena.layers[layer].plane(1)
    where = torch.from_numpy(site.relocated).to(site.arena.device)
    before = values.tensor().index_select(1, where).float()
    site.run(np.union1d(site.relocated, site.computed), layers=layer + 1)
    deviations = (values.tensor().index_select(1, where).float() - before).square().sum((0, 2))
    return _largest(site.relocated, deviations, _count(site, budget))


def _attention(site: Site, budget: float) -> Positions:
    """Choose the tokens that get most attention, see `_attended`."""
    return _largest(site.relocated, _attended(site, _ASKING).sum(0), _count(site, budget))


def _impact(site: Site, budget: float) -> Positions:
    """Choose the tokens whose error affects the answer most. They or their neighbours get most attention from the rows
    that decide it; the middle and the last third of the layers count equally."""
    third = len(site.arena.layers) // 3
    attended = _attended(site, _ANSWERING, third)
    parts = [part.sum(0) for part in (attended[third : 2 * third or 1], attended[2 * third :])]
    weight = torch.stack([part / part.sum() for part in parts]).sum(0)
    near = torch.tensor(_NEAR, dtype=weight.dtype, device=weight.device)
    weight = torch.nn.functional.conv1d(weight[None, None], near[None, None], padding=len(_NEAR) // 2)[0, 0]
    return _largest(site.relocated, weight, _count(site, budget))


def _attended(site: Site, rows: int, first: int = 0) -> torch.Tensor:
    """Run the computed positions once over the unrepaired chunks. Return the attention of the last `rows` of them in
    layers from `first` on: probability, summed over rows and heads, `[layers, relocated]`."""
    mass = torch.zeros(len(site.arena.layers), site.plan.length, dtype=torch.float32, device=site.arena.device)
    earlier, last = site.computed[: -site.step], site.computed[-site.step :]
    site.run(earlier)
    site.rows.run(site.tokens[last], last, site.arena, watch=Watch(mass, last[-rows:], first))
    if not mass.any():
        raise UnsupportedModel(
            "this model's attention cannot be watched, which repair='attention' and 'impact' need: "
            "use repair='deviation:0.15'"
        )
    return mass[:, torch.from_numpy(site.relocated).to(mass.device)]


def _largest(positions: Positions, scores: torch.Tensor, count: int) -> Positions:
    chosen: Positions = np.sort(scores.topk(count).indices.cpu().numpy())
    return positions[chosen]


STRATEGIES: dict[str, Strategy] = {
    "none": _none,
    "seam": _seam,
    "leading": _leading,
    "deviation": _deviation,
    "attention": _attention,
    "impact": _impact,
}


def choose(site: Site, rule: RepairRule) -> Positions:
    """Return the relocated positions that a rule recomputes, rising."""
    if rule.is_none:
        return site.relocated[:0]
    if rule.strategy in ("deviation", "attention", "impact") and _count(site, rule.budget) == len(site.relocated):
        return site.relocated
    return STRATEGIES[rule.strategy](site, rule.budget)


def blend(
    plan: LinkPlan, tokens: TokenIds, arena: Arena, rows: Rows, step: int, rotaries: Sequence[Rotary | None]
) -> Blended:
    """Compute the prompt to its end. The chunks of `plan` are in place in `arena`, and all before them is computed.

    `rotaries` are those of the layers. `divergence` is the relative change of relocated values at the recomputed tokens
    (root mean square over tokens and some layers), times the share of relocated tokens that are not recomputed; None
    when none is recomputed. It ignores what the other tokens take over.
    """
    site = _site(plan, tokens, arena, rows, step)
    clock = partial(arena.port.current().record, timed=True)  # the device's clock, as it works asynchronously
    started = clock()
    rule = plan.repair.rule if plan.repair is not None else RepairRule("none")
    chosen = choose(site, rule)
    selected = clock()
    behind, divergence = site.computed, None
    copied = recomputed = carried = selected
    if len(chosen):
        between, behind = np.split(behind, [np.searchsorted(behind, site.relocated[-1])])
        changes = Changes(arena, chosen, _chunks(plan), rotaries)
        copied = clock()
        site.run(np.union1d(chosen, between))
        recomputed = clock()
        changes.carry()
        divergence = changes.divergence(_MEASURED) * (1 - len(chosen) / len(site.relocated))
        carried = clock()
    logits = site.run(behind, logits=True)
    assert logits is not None
    arena.advance(plan.length)
    done = clock()
    carrying = copied.seconds_since(selected) + carried.seconds_since(recomputed)
    times = (selected.seconds_since(started), done.seconds_since(selected) - carrying, carrying)
    return Blended(logits, len(chosen), divergence, *(1e3 * seconds for seconds in times))


def _site(plan: LinkPlan, tokens: TokenIds, arena: Arena, rows: Rows, step: int) -> Site:
    relocated = np.concatenate([np.arange(span.start, span.end) for span in plan.relocates])
    later = [span for span in plan.computes if span.start >= plan.blended_from]
    computed = np.concatenate([np.arange(span.start, span.end) for span in later])
    return Site(plan, tokens, arena, rows, step, relocated, computed)


def _chunks(plan: LinkPlan) -> list[tuple[int, int]]:
    """Return the chunks as they were stored: the blocks of a long one are joined."""
    found: list[tuple[int, int]] = []
    delta: int | None = None
    for span in plan.relocates:
        goes_on = bool(found) and found[-1][1] == span.start and delta == span.start - span.source_start
        if goes_on:
            found[-1] = (found[-1][0], span.end)
        else:
            found.append((span.start, span.end))
        delta = span.start - span.source_start
    return found


def _count(site: Site, share: float) -> int:
    return round(share * len(site.relocated))
