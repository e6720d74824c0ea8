"""The label of KV from the store under vLLM: how an answer over it relates to one that vLLM computes whole."""

from __future__ import annotations

from typing import Any

from vllm.config import CompilationMode

from keepwarm.core.spans import Exactness
from keepwarm.integrations.vllm.identity import Facts

# vLLM's backends that are invariant to the batch, but not to a prefix that is already there: vLLM switches its own
# prefix cache off for them in this mode.
_NOT_OVER_A_PREFIX = frozenset({"FLASHINFER", "TRITON_MLA"})


def label_of(config: Any, facts: Facts) -> Exactness:
    """Return the label, in a worker whose model is loaded. `config` is vLLM's `VllmConfig`.

    Names hold the model, the backend and the device, but not what else was in a step. Only in vLLM's batch-invariant
    mode do bits not depend on that, and only if every layer's attention keeps to it. In that mode names also hold how
    vLLM compiles; where it cannot say how, nothing is exact. Nor is it where kernels are chosen by measuring: no name
    holds what another process has chosen.
    """
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    is_invariant = (
        facts.batch_invariant
        and bool(facts.compiled)
        and bool(backends)
        and all(each.supports_batch_invariance() for each in backends)
        and _NOT_OVER_A_PREFIX.isdisjoint(each.get_name() for each in backends)
        and config.speculative_config is None  # steps that also compute rejected tokens were never compared
        and not _measures(config)
    )
    return Exactness.EXACT if is_invariant else Exactness.PREFIX


def _measures(config: Any) -> bool:
    """Whether vLLM chooses kernels by measuring while it starts: Inductor does, and FlashInfer may."""
    return (
        config.compilation_config.mode != CompilationMode.NONE
        or config.kernel_config.enable_flashinfer_autotune is not False
    )
