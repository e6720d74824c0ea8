"""The label of KV from the store: `exact` in vLLM's batch-invariant mode, and only then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.helpers.vllm_process import ask, cached, ids, start
from vllm.config import CompilationMode
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from keepwarm.core.spans import Exactness
from keepwarm.integrations.vllm.counts import TransferStats
from keepwarm.integrations.vllm.identity import Facts
from keepwarm.integrations.vllm.label import label_of


def backend(name: str, *, invariant: bool) -> type[AttentionBackend]:
    """A backend of vLLM's interface that says this of itself."""
    said = {"get_name": staticmethod(lambda: name), "supports_batch_invariance": classmethod(lambda cls: invariant)}
    return type(name, (AttentionBackend,), said)


FACTS = Facts("FLASH_ATTN", "NVIDIA H100 80GB HBM3", "9.0", "LBNHC", True, 3, compiled="a digest")
FLASH, OTHER = backend("FLASH_ATTN", invariant=True), backend("ROCM_ATTN", invariant=False)
TRITON_MLA = backend("TRITON_MLA", invariant=True)


def config(
    *backends: Any, drafts: Any = None, mode: CompilationMode = CompilationMode.NONE, tunes: bool | None = False
) -> Any:
    layers: list[Any] = [SimpleNamespace(get_attn_backend=lambda each=each: each) for each in backends]
    context = dict(enumerate([*layers, object()]))  # experts, for example, have no attention
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context, mode=mode),
        kernel_config=SimpleNamespace(enable_flashinfer_autotune=tunes),
        speculative_config=drafts,
    )


def test_exact_in_the_batch_invariant_mode() -> None:
    assert label_of(config(FLASH, FLASH), FACTS) is Exactness.EXACT


@pytest.mark.parametrize(
    ("told", "facts"),
    [
        (config(FLASH), replace(FACTS, batch_invariant=False)),
        (config(FLASH), replace(FACTS, compiled="")),  # vLLM cannot say how it compiles
        (config(OTHER), FACTS),
        (config(FLASH, OTHER), FACTS),
        (config(TRITON_MLA), FACTS),  # vLLM switches its own prefix cache off there
        (config(CPUAttentionBackend), FACTS),
        (config(), FACTS),
        (config(FLASH, drafts=object()), FACTS),
        (config(FLASH, mode=CompilationMode.VLLM_COMPILE), FACTS),  # Inductor chooses kernels by measuring
        (config(FLASH, tunes=True), FACTS),  # so does FlashInfer
        (config(FLASH, tunes=None), FACTS),
    ],
)
def test_prefix_otherwise(told: Any, facts: Facts) -> None:
    assert label_of(told, facts) is Exactness.PREFIX


def test_what_is_loaded_is_counted_by_its_label() -> None:
    for label, name in ((Exactness.EXACT, "loaded_exact_tokens"), (Exactness.PREFIX, "loaded_prefix_tokens")):
        counts = TransferStats(label)
        counts.loaded({"disk": 64}, 0.1)
        counts.loaded({"ram": 32}, 0.1)
        taken = counts.take()
        assert (taken[name], taken["loaded_tokens"]) == (96, 96)
        assert len([each for each in taken if each in ("loaded_exact_tokens", "loaded_prefix_tokens")]) == 1


@pytest.fixture
def model(saved: Callable[..., Path]) -> Path:
    return saved("llama", hidden_size=512, head_dim=64, max_position_embeddings=4096, num_attention_heads=8)


def digests(found: list[dict[str, Any]]) -> list[str]:
    """A digest of each answer and of its log-probabilities, to the last bit."""
    return [hashlib.sha256(json.dumps([each["ids"], each["scores"]]).encode()).hexdigest() for each in found]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM has batch-invariant kernels for GPUs alone")
def test_digests_in_the_batch_invariant_mode(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts over what others left in the store, alone and together, have the bits of a vLLM without a store."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    head = ids(640, 1)
    prompts = [head + ids(count, 100 + count) for count in (5, 31, 32, 33, 300)]
    settings = {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "disable_log_stats": False}
    alone, together = ask(prompts, scores=True), ask(prompts, scores=True, together=True)
    (cold,) = start(model, None, alone, enable_prefix_caching=False, **settings)
    store = {"store": str(tmp_path / "store"), "max_ram": 0}
    start(model, store, ask([head, ids(90, 2)], together=True), {"flush": True}, **settings)
    found = start(
        model, store, alone, {"flush": True}, {"forget": True}, together, {"metrics": "vllm:keepwarm"}, **settings
    )
    assert min(cached(found[0]) + cached(found[3])) >= 640
    assert digests(found[0]) == digests(found[3]) == digests(cold)
    assert found[4]["vllm:keepwarm_loaded_exact_tokens"] == found[4]["vllm:keepwarm_loaded_tokens"]
