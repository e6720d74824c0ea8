"""What Keepwarm itself would reuse of a log. Under invariant arithmetic it reuses a prompt up to the first character
that differs from the nearest earlier one of its model, whatever breakpoints it marks and however old that one is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from keepwarm.lint.prompt import SETTINGS, Prompt
from keepwarm.lint.replay import Outcome, replay
from keepwarm.lint.rules import Prices, VendorRules

_RULES = VendorRules(
    minimum=1,
    increment=1,
    ttl_seconds=math.inf,
    long_ttl_seconds=math.inf,
    lookback_blocks=None,
    breakpoints=None,
    read=0.0,
    write=1.0,
    write_1h=1.0,
    models={},
)
_PRICES = Prices(date="", openai=_RULES, anthropic=_RULES)


def by_keepwarm(prompts: Iterable[Prompt]) -> list[Outcome]:
    """Return what each prompt would read from one Keepwarm that is never full."""
    return list(replay(map(_as_read, prompts), _PRICES))


def _as_read(prompt: Prompt) -> Prompt:
    """Return a prompt without the settings that only vendors' caches read."""
    parts = (replace(part, ttl=0.0) for part in prompt.parts if part.kind != SETTINGS)
    return replace(prompt.with_parts(parts), key="", automatic=0.0, retention=0.0)
