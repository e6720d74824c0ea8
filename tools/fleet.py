"""Fills in the sizes of docs/fleet.md: what prompts of published models weigh, and how fast a network they need.

A block stands between `<!-- sizes: NAME -->` and `<!-- end -->`. `python -m tools.fleet` writes the blocks anew from
the configurations of the models; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from keepwarm.core.geometry import geometry_of
from keepwarm.models.presets import preset
from tools.figures.results import table

PAGE = Path(__file__).parents[1] / "docs" / "fleet.md"
MODELS = {
    "qwen2.5-7b": "Qwen2.5 7B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen3-8b": "Qwen3 8B",
    "qwen3-14b": "Qwen3 14B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B, experts",
    "qwen3-32b": "Qwen3 32B",
    "llama-3.3-70b": "Llama 3.3 70B",
    "deepseek-v3": "DeepSeek V3, latent attention",
}
SPEEDS = (1_000, 2_000, 5_000, 10_000, 20_000)  # tokens per second that a replica prefills
LINKS = (10, 25, 100)  # Gbit/s
TOKENS = 32_000  # of the long prompt

_BLOCK = re.compile(r"(<!-- sizes: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return the page with its blocks made anew. Raises KeyError for an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def break_even() -> str:
    """Bytes per token, and the network speed at which loading a token takes as long as computing it."""
    head = ("model", "bytes per token", *(f"at {speed:,} tokens/s" for speed in SPEEDS))
    rows = [
        (shown, f"{weight:,}", *(f"{_digits(weight * speed * 8 / 1e9)} Gbit/s" for speed in SPEEDS))
        for shown, weight in _weights()
    ]
    return table(head, rows)


def loading() -> str:
    """A long prompt's weight, the time in which networks load it, and the prompts that fit into a terabyte."""
    head = ("model", "weight", *(f"over {link} Gbit/s" for link in LINKS), "prompts in 1 TB")
    rows = [
        (
            shown,
            f"{_digits(weight * TOKENS / 1e9)} GB",
            *(f"{_digits(weight * TOKENS * 8 / (link * 1e9))} s" for link in LINKS),
            f"{10**12 // (weight * TOKENS):,}",
        )
        for shown, weight in _weights()
    ]
    return table(head, rows)


def computing() -> str:
    """The time that the same prompt takes to compute: it depends on the replica's speed alone."""
    head = ("prefill speed", *(f"{speed:,} tokens/s" for speed in SPEEDS))
    return table(head, [("computing", *(f"{_digits(TOKENS / speed)} s" for speed in SPEEDS))])


BLOCKS = {"break-even": break_even, "loading": loading, "computing": computing}


def _weights() -> list[tuple[str, int]]:
    """Each model's name as people write it, and its bytes per token in bfloat16."""
    return [(shown, geometry_of(preset(name), "bfloat16").bytes_per_token) for name, shown in MODELS.items()]


def _digits(value: float) -> str:
    """A number with three digits that count, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
