"""What one class of models does with the cache: a tiny model of it through engines, warm against cold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.every_config import CLASSES
from tests.helpers.every_exception import NOT_RUN
from tests.helpers.every_model import make
from tests.helpers.letters import letters

from keepwarm import Batcher, Engine
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.loader import LoadedModel
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner
from keepwarm.sessions.turn import marked

SETTINGS: dict[str, Any] = {"step": 64, "min_step": 8, "settle_after": None}
EXACT, SERIAL, NO, UNTRIED = "exact", "exact, token by token", "no", "not run"
CACHED = (EXACT, SERIAL)

_HEAD = "The harbour has nine piers, and each of them takes boats of another length. The first is short. "
_BODY = "Boats of nine metres go to pier nine, and those of three metres "
PROMPTS: dict[str, list[str]] = {
    "first": [_HEAD, _BODY, "to pier three?"],
    "fork": [_HEAD, _BODY, "to which one?"],
    "edit": [_HEAD, _BODY.replace("nine", "four"), "to pier three?"],
}
_SAID = ("Which pier is free?", "And after that?")


def examine(model_type: str, folder: Path) -> dict[str, Any]:
    """A row of the table. Raises AssertionError, which names what differs, for a class that is cached wrongly."""
    row: dict[str, Any] = {"type": model_type, "class": CLASSES[model_type], "cached": NO, "keeps": []}
    if model_type in NOT_RUN:
        return row | {"cached": UNTRIED, "reason": NOT_RUN[model_type]}
    model = make(model_type)
    try:
        with Engine.from_pretrained((model, letters()), store=folder, **SETTINGS) as engine:
            loaded = engine.pipeline.model
            row |= _kept(loaded)
            cold = {name: _digest(engine, prompt, reuse="off") for name, prompt in PROMPTS.items()}
            if loaded.uncached_reason:
                _uncached_is_right(engine, cold)
                return row | {"reason": loaded.uncached_reason}
            row["cached"] = SERIAL if loaded.runner.serial else EXACT
            _warm(engine, cold, serial=loaded.runner.serial)
            _batched(engine, cold)
            row["turns"] = _talk(engine, serial=loaded.runner.serial)
    except UnsupportedModel as refused:
        return row | {"reason": str(refused)}
    with Engine.from_pretrained((model, letters()), store=folder, **SETTINGS) as engine:
        _reused(engine, "first", cold, "disk")
    _encoded(model, folder / "int8", has_kv=bool(row["bytes_per_token"]))
    return row


def _kept(loaded: LoadedModel) -> dict[str, Any]:
    """What was measured at load."""
    usual = loaded.form if loaded.uncached_reason else probe(Runner(loaded.model, None)).form
    return {
        "keeps": _words(loaded),
        "bytes_per_token": loaded.geometry.bytes_per_token,
        "state_bytes": usual.state_bytes,  # as transformers keeps it
        "arithmetic": "invariant" if loaded.runner.is_invariant else "scheduled",
    }


def _words(loaded: LoadedModel) -> list[str]:
    """Kinds of what the layers keep, in words that `docs/models.md` explains."""
    form, geometry = loaded.form, loaded.geometry
    index = {each.index_keys for each in form.each}
    layers = [layer for at, layer in enumerate(geometry.layers) if at not in index]
    text = loaded.model.config.get_text_config(decoder=True).to_dict()
    latent = "kv_lora_rank" in text and any(layer.key_dim != layer.value_dim for layer in layers)
    found = {
        "latent attention": bool(latent),
        "attention": not latent and any(layer.window is None for layer in layers),
        "windows": any(layer.window is not None for layer in layers),
        "index keys": bool(index - {None}),
        "recurrent state": form.own is None and any(each.states is not None for each in form.each),
        "layers that keep nothing": any(each.kv is None and each.states is None for each in form.each),
        "a cache of its own": form.own is not None,
    }
    return [word for word, there in found.items() if there]


def _digest(engine: Engine, prompt: list[str], **arguments: Any) -> str:
    return str(engine.generate(segments=prompt, max_new_tokens=4, trace=True, **arguments).logits_digest)


def _reused(engine: Engine, name: str, cold: dict[str, str], tier: str | None = None) -> None:
    """A prompt is answered as without the cache, and from it."""
    warm = engine.generate(segments=PROMPTS[name], max_new_tokens=4, trace=True)
    assert warm.logits_digest == cold[name], f"{name} from {warm.cached_by_tier} differs"
    assert warm.exactness == "exact", f"{name} is {warm.exactness}"
    assert warm.cached_tokens > 0, f"{name}: nothing was reused"
    if tier is not None:
        found = {each for each, tokens in warm.cached_by_tier.items() if tokens}
        assert found == {tier}, f"{name} came from {found}, not from {tier}"
    engine.flush()


def _warm(engine: Engine, cold: dict[str, str], *, serial: bool) -> None:
    assert _digest(engine, PROMPTS["first"]) == cold["first"], "the first run differs from one without the cache"
    engine.flush()
    has_kv = bool(engine.pipeline.model.geometry.layers)
    _reused(engine, "first", cold, "device" if has_kv else None)
    engine.pipeline.pool.forget()
    _reused(engine, "first", cold, "ram" if has_kv else None)
    _reused(engine, "fork", cold)
    if serial:  # it is cut once, behind the edit
        assert _digest(engine, PROMPTS["edit"]) == cold["edit"], "an edited prompt differs"
    else:
        _reused(engine, "edit", cold)


def _batched(engine: Engine, cold: dict[str, str]) -> None:
    with Batcher(engine) as batch:
        tickets = {n: batch.submit(segments=p, max_new_tokens=4, trace=True) for n, p in PROMPTS.items()}
        for name, ticket in tickets.items():
            assert ticket.result(120).logits_digest == cold[name], f"{name} differs in a batch"


def _talk(engine: Engine, *, serial: bool) -> int:
    """Tokens that the second turn of a conversation reuses."""
    session = engine.sessions.open("harbour", system=_HEAD)
    cached = 0
    for said in _SAID:
        result = session.say(said, max_new_tokens=4, trace=True)
        asked = marked(list(session.show().messages)[:-1])
        fresh = engine.generate(messages=asked, max_new_tokens=4, trace=True, reuse="off")
        assert result.logits_digest == fresh.logits_digest, f"{said!r} differs in a conversation"
        session.settle()
        cached = result.cached_tokens
    assert cached or serial, "the second turn reuses nothing"
    return cached


def _encoded(model: Any, folder: Path, *, has_kv: bool) -> None:
    """KV that is quantized where it is stored says so, and is good enough to count with."""
    settings = SETTINGS | {"store": folder, "kv_codec": "int8", "reuse": "prefix"}
    with Engine.from_pretrained((model, letters()), **settings) as engine:
        engine.generate(segments=PROMPTS["first"], max_new_tokens=1)
        engine.flush()
        engine.pipeline.pool.forget()
        found = engine.generate(segments=PROMPTS["fork"], max_new_tokens=4, logprobs=1)
        assert found.cached_tokens, "nothing was reused of an encoded store"
        labels = {"quantized"} if has_kv else {"quantized", "exact"}
        assert found.exactness in labels, f"an encoded store's answer is {found.exactness}"
        assert all(math.isfinite(each.logprob) for each in found.logprobs or ()), "not finite behind quantized KV"


def _uncached_is_right(engine: Engine, cold: dict[str, str]) -> None:
    """What runs without the cache is not changed by what runs beside it either."""
    again: Callable[[str], str] = lambda name: _digest(engine, PROMPTS[name])  # noqa: E731
    for name, digest in cold.items():
        assert again(name) == digest, f"{name} differs although nothing is cached"
    _batched(engine, cold)
