"""What the examples share: each request once cold and once from the cache, side by side."""

from __future__ import annotations

from typing import Any

from keepwarm import Engine


def compare(engine: Engine, name: str, tokens: int, reuse: str = "exact", **request: Any) -> str:
    """Answer a request without the cache and with it, print both, and return the answer."""
    cold = engine.generate(**request, max_new_tokens=tokens, reuse="off")
    warm = engine.generate(**request, max_new_tokens=tokens, reuse=reuse)
    engine.flush()  # so that the next request finds what this one computed
    print(f"{name}")
    print(f"  cold {cold.ttft_ms:7.0f} ms to the first token, {cold.tokens_per_sec:5.1f} tokens/s  {cold.text!r}")
    print(
        f"  warm {warm.ttft_ms:7.0f} ms, {warm.kv_reuse_ratio:.0%} of {warm.prompt_tokens} tokens reused, "
        f"{warm.exactness}, {warm.tokens_per_sec:5.1f} tokens/s  {warm.text!r}"
    )
    return warm.text
