"""Identities the core tests share."""

from __future__ import annotations

from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace

MODEL = ModelIdentity(
    weights="w" * 64, config="c" * 64, dtype="bfloat16", quantization="none", rope='{"theta":10000}', tokenizer="t" * 64
)
ARITHMETIC = ArithmeticIdentity(
    torch="2.13.0", device="cpu", instruction_set="avx512", threads=2, attention="prefix+step"
)
NAMESPACE = Namespace(MODEL, ARITHMETIC)
