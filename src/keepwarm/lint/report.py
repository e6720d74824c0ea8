"""The report on a log: what its requests read from the cache, what they could, and what to do first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from keepwarm.core.changing import IDS, TIMES, Mend, mend
from keepwarm.lint.edits import EDITS, Edit, looks_current
from keepwarm.lint.log import Broken, Logged, read_log
from keepwarm.lint.own import by_keepwarm
from keepwarm.lint.prompt import MESSAGE, SCHEMA, SYSTEM, TOOLS, Part, Prompt, estimated_tokens, prompt_of
from keepwarm.lint.replay import Outcome, common_length, replay
from keepwarm.lint.rules import Prices

_AROUND = 60  # characters shown before and after a difference
_SCALES = (0.5, 2.0)  # a usage further from the estimate counts pictures or is another request's
_SETTINGS = {"no_breakpoint", "ttl", "cache_key", "changing_settings"}  # edits of what is sent beside the texts
_WORTH_IT = {"no_breakpoint", "ttl"}  # edits that cost something: advised only where they save more


@dataclass(frozen=True)
class Place:
    """Where something stands in a log."""

    line: int
    kind: str  # of the part
    part: str
    char: int  # in the part
    token: int  # in the prompt, estimated
    text: str  # around it


@dataclass(frozen=True)
class Saving:
    """Tokens that an edit makes readable from the cache, and what that saves; None where no price is known."""

    tokens: int = 0
    dollars: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        return self.dollars or 0.0, self.tokens


@dataclass(frozen=True)
class Finding:
    """Something in the way of the cache.

    `severity` is "costs" when the log shows that it changes, and "risk" when it only looks so. `alone` is what removing
    it saves in this log; `together` is what removing it adds once all other findings are removed.
    """

    kind: str
    severity: str
    advice: str
    requests: int
    alone: Saving
    together: Saving
    where: Place
    other: Place | None = None  # the same place in another request
    needless_by_keepwarm: bool = False  # it helps in the vendor's cache alone

    @property
    def worth(self) -> Saving:
        return max(self.alone, self.together, key=lambda saving: saving.rank)


@dataclass(frozen=True)
class Amounts:
    """Tokens and money of some requests under one way of sending them."""

    read: int
    written: int
    hit_rate: float  # share of prompt tokens
    dollars: float | None  # of all prompt tokens; None where a price is not known


@dataclass(frozen=True)
class Group:
    """The requests of one model."""

    vendor: str
    model: str
    requests: int
    prompt_tokens: int
    billed_hit_rate: float | None  # as the log's own usage says
    as_is: Amounts
    achievable: Amounts
    lost_tokens: int
    lost_dollars: float | None
    keepwarm_hit_rate: float  # as sent, of a Keepwarm that is never full


@dataclass(frozen=True)
class Report:
    """Outcome of `lint`."""

    requests: int
    broken: tuple[Broken, ...]
    timed: bool  # every request says when it was sent; otherwise nothing expires in the replay
    prices: str  # date of the rules and prices
    unconfirmed: tuple[str, ...]  # used rules and prices that no page of the vendor's own confirms
    groups: tuple[Group, ...]
    misses: dict[str, int]  # tokens that could have been read, by what was in the way
    findings: tuple[Finding, ...]
    first_edit: Finding | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mended(found: Finding) -> Mend | None:
    """Return what stands where a finding is, with the rule that would mend it; None if it looks like nothing known."""
    return mend(found.where.text, "", min(found.where.char, _AROUND))


def lint(text: str, prices: Prices, vendor: str | None = None) -> Report:
    """Replay a log without a model. Raises nothing, whatever the log holds."""
    requests, broken = read_log(text, vendor)
    prompts = _scaled(requests, [prompt_of(request) for request in requests])
    as_is, own = list(replay(prompts, prices)), by_keepwarm(prompts)
    found = _found(prompts, prices)
    everything = _edited(prompts, [edit for edit, _ in found], prices)
    achievable, own_best = list(replay(everything, prices)), _read(by_keepwarm(everything))
    findings = []
    for edit, (where, other) in found:
        single = _edited(prompts, [edit], prices)
        others = _edited(prompts, [each for each, _ in found if each is not edit], prices)
        alone, rest = list(replay(single, prices)), list(replay(others, prices))
        quads = zip(as_is, alone, rest, achievable, strict=True)
        touched = sum(b.read > a.read or d.read > c.read for a, b, c, d in quads)
        saved = _saving(as_is, alone), _saving(rest, achievable)
        needless = _read(by_keepwarm(single)) <= _read(own) and own_best <= _read(by_keepwarm(others))
        findings.append(Finding(edit.kind, "costs", edit.advice, touched, *saved, where, other, needless))
    findings.sort(key=lambda found: (*(-part for part in found.worth.rank), found.where.token))
    first = next((found for found in findings if found.worth.tokens > 0), None)
    return Report(
        len(requests),
        tuple(broken),
        bool(prompts) and all(prompt.at is not None for prompt in prompts),
        prices.date,
        _unconfirmed(prompts, prices),
        tuple(_groups(requests, as_is, achievable, own)),
        _misses(as_is, achievable),
        (*findings, *_risks(prompts, findings)),
        first,
    )


def _unconfirmed(prompts: Sequence[Prompt], prices: Prices) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for prompt in prompts:
        rules = prices.of(prompt.vendor)
        model = rules.known(prompt.model)
        missing = rules.models[model].unconfirmed if model else ()
        found.update(dict.fromkeys(f"{model} {field}" for field in missing))
        found.update(dict.fromkeys(f"{prompt.vendor} {field}" for field in rules.unconfirmed))
    return tuple(sorted(found))


def _scaled(requests: Sequence[Logged], prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with their estimates fitted to what was billed for the same model."""
    billed: Counter[tuple[str, str]] = Counter()
    estimated: Counter[tuple[str, str]] = Counter()
    for request, prompt in zip(requests, prompts, strict=True):
        if request.usage is not None and prompt.tokens:
            ratio = request.usage.prompt / prompt.tokens
            if _SCALES[0] <= ratio <= _SCALES[1]:
                billed[prompt.vendor, prompt.model] += request.usage.prompt
                estimated[prompt.vendor, prompt.model] += prompt.tokens
    scales = {key: billed[key] / count for key, count in estimated.items()}
    return [replace(prompt, scale=scales.get((prompt.vendor, prompt.model), 1.0)) for prompt in prompts]


def _worth(edit: Edit, prompts: list[Prompt], prices: Prices) -> list[Prompt]:
    """Return the edited prompts. An edit that costs something is applied only to models where it saves more."""
    edited = edit.apply(prompts)
    if edit.kind not in _WORTH_IT or edited == prompts:
        return edited
    saved: dict[tuple[str, str], float] = defaultdict(float)
    for before, after in zip(replay(prompts, prices), replay(edited, prices), strict=True):
        saved[before.prompt.vendor, before.prompt.model] += before.units - after.units
    pairs = zip(prompts, edited, strict=True)
    return [new if saved[old.vendor, old.model] > 0 else old for old, new in pairs]


def _edited(prompts: list[Prompt], edits: Iterable[Edit], prices: Prices) -> list[Prompt]:
    for edit in edits:
        prompts = _worth(edit, prompts, prices)
    return prompts


def _found(prompts: list[Prompt], prices: Prices) -> list[tuple[Edit, tuple[Place, Place | None]]]:
    """Return the edits that would change what can be read, and where. What an earlier edit fixes is not found again."""
    found: list[tuple[Edit, tuple[Place, Place | None]]] = []
    so_far = prompts
    where: tuple[Place, Place | None] | None
    for edit in EDITS:
        edited = _worth(edit, so_far, prices)
        if edited == so_far:
            continue
        if edit.kind in _SETTINGS:
            before, after = list(replay(so_far, prices)), list(replay(edited, prices))
            gains = (old.prompt for old, new in zip(before, after, strict=True) if new.read > old.read)
            first = next(gains, None)
            where = None if first is None else (_place(first, _marked(first, edited), 0), None)
        else:
            where = _evidence(prompts, edit.apply(prompts)) if _evidence(so_far, edited) else None
        if where is not None:
            found.append((edit, where))
            so_far = edited
    return found


def _marked(prompt: Prompt, edited: Sequence[Prompt]) -> int:
    """Return the index of the first part that an edit marked in a prompt."""
    after = next(other for other in edited if other.line == prompt.line)
    pairs = enumerate(zip(prompt.parts, after.parts, strict=False))
    return next((index for index, (old, new) in pairs if old.ttl != new.ttl), 0)


def _saving(before: Sequence[Outcome], after: Sequence[Outcome]) -> Saving:
    tokens = sum(b.read for b in after) - sum(a.read for a in before)
    pairs = zip(before, after, strict=True)
    known = [(a.units - b.units) * a.price for a, b in pairs if a.price is not None]
    return Saving(max(0, tokens), max(0.0, sum(known)) if known else None)


def _evidence(prompts: Sequence[Prompt], edited: Sequence[Prompt]) -> tuple[Place, Place | None] | None:
    """Return the two places nearest to a prompt's beginning that an edit makes equal; None without any."""
    seen: dict[tuple[str, ...], tuple[Prompt, int]] = {}
    best: tuple[Place, Place | None] | None = None
    for before, after in zip(prompts, edited, strict=True):
        for index, (part, same) in enumerate(zip(before.parts, after.parts, strict=False)):
            if part.kind == MESSAGE and index == len(before.parts) - 1 and index:
                continue  # the last message changes anyway
            key = (before.vendor, before.model, same.kind, same.text, str(index))
            other = seen.setdefault(key, (before, index))
            earlier = other[0].parts[other[1]]
            if earlier.text == part.text:
                continue
            char = common_length(part.text, earlier.text)
            here = _place(before, index, char)
            if best is None or here.token < best[0].token:
                best = here, _place(other[0], other[1], char)
    return best


def _place(prompt: Prompt, index: int, char: int) -> Place:
    part = prompt.parts[index]
    token = sum(p.tokens for p in prompt.parts[:index]) + estimated_tokens(part.text[:char])
    shown = part.text[max(0, char - _AROUND) : char + _AROUND]
    return Place(prompt.line, part.kind, part.name, char, round(prompt.scale * token), shown)


def _risks(prompts: Sequence[Prompt], findings: Sequence[Finding]) -> list[Finding]:
    """Return what will break caching but does not in this log, which sends these heads once or unchanged."""
    shown = {found.kind for found in findings}
    found: dict[tuple[str, str, str], Finding] = {}
    for prompt in prompts:
        for index, part in enumerate(prompt.parts):
            if part.kind not in (TOOLS, SCHEMA, SYSTEM) and index:
                continue
            for kind, char, advice in _suspects(part):
                key = (kind, part.kind, part.text)
                if kind not in shown and key not in found:
                    found[key] = Finding(kind, "risk", advice, 1, Saving(), Saving(), _place(prompt, index, char))
                elif key in found:
                    found[key] = replace(found[key], requests=found[key].requests + 1)
    return list(found.values())[:50]


def _suspects(part: Part) -> Iterable[tuple[str, int, str]]:
    advice = {edit.kind: edit.advice for edit in EDITS}
    time = next((match for match in TIMES.finditer(part.text) if looks_current(part.text, match)), None)
    if time is not None:
        yield "timestamp", time.start(), advice["timestamp"]
    if (match := IDS.search(part.text)) is not None:
        yield "random_id", match.start(), advice["random_id"]
    if part.kind == SYSTEM and part.text != part.text.rstrip():
        yield "trailing_whitespace", len(part.text.rstrip()), advice["trailing_whitespace"]


def _groups(
    requests: Sequence[Logged], as_is: Sequence[Outcome], achievable: Sequence[Outcome], own: Sequence[Outcome]
) -> Iterable[Group]:
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, outcome in enumerate(as_is):
        members[outcome.prompt.vendor, outcome.prompt.model].append(index)
    for (vendor, model), indices in sorted(members.items()):
        now, then = ([outcomes[i] for i in indices] for outcomes in (as_is, achievable))
        usages = [usage for i in indices if (usage := requests[i].usage) is not None]
        billed = sum(usage.prompt for usage in usages)
        a, b = _amounts(now), _amounts(then)
        yield Group(
            vendor,
            model,
            len(indices),
            sum(o.tokens for o in now),
            sum(usage.cached for usage in usages) / billed if billed else None,
            a,
            b,
            max(0, b.read - a.read),
            None if a.dollars is None or b.dollars is None else max(0.0, a.dollars - b.dollars),
            _amounts([own[i] for i in indices]).hit_rate,
        )


def _read(outcomes: Iterable[Outcome]) -> int:
    return sum(outcome.read for outcome in outcomes)


def _amounts(outcomes: Sequence[Outcome]) -> Amounts:
    total, read = sum(o.tokens for o in outcomes), sum(o.read for o in outcomes)
    costs = [o.units * o.price for o in outcomes if o.price is not None]
    dollars = sum(costs) if len(costs) == len(outcomes) else None
    return Amounts(read, sum(o.written for o in outcomes), read / total if total else 0.0, dollars)


def _misses(as_is: Sequence[Outcome], achievable: Sequence[Outcome]) -> dict[str, int]:
    """Count tokens that could have been read, by the part in which a prompt diverges from the nearest earlier one."""
    causes: Counter[str] = Counter()
    for now, then in zip(as_is, achievable, strict=True):
        lost = then.read - now.read
        if lost <= 0:
            continue
        near, parts = now.nearest, now.prompt.parts
        if now.expired:
            causes["expired"] += lost
        elif near is None:
            causes["no earlier request under this model and key"] += lost
        elif near.part >= len(parts):
            causes["not marked for caching"] += lost
        else:
            causes[parts[near.part].kind] += lost
    return dict(causes.most_common())
