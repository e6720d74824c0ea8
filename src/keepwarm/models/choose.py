"""Which adapter a model gets: by its template and its configuration, never by its name or folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepwarm.config import ToolOrder
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.llama import LlamaAdapter
from keepwarm.models.mistral import MistralAdapter
from keepwarm.models.qwen import QwenAdapter
from keepwarm.models.tokenizer import HFTokenizer

# texts that only this family's template holds
_TEMPLATES: tuple[tuple[type[GenericAdapter], tuple[str, ...]], ...] = (
    (MistralAdapter, ("[AVAILABLE_TOOLS]",)),
    (MistralAdapter, ("[TOOL_CALLS]",)),
    (LlamaAdapter, ("<|start_header_id|>",)),
    (QwenAdapter, ("<|im_start|>", "<tools>", "<tool_call>")),
)
# a family's architectures, and what its template holds even when it has no tools
_ARCHITECTURES: tuple[tuple[type[GenericAdapter], tuple[str, ...], str], ...] = (
    (MistralAdapter, ("mistral", "mixtral", "ministral"), "[INST]"),
    (QwenAdapter, ("qwen",), "<|im_start|>"),
)


def choose_adapter(
    config: Mapping[str, Any],
    tokenizer: HFTokenizer,
    *,
    tool_order: ToolOrder = "as_sent",
    template_args: Mapping[str, Any] | None = None,
) -> GenericAdapter:
    """Return the adapter for a model's configuration (`config.to_dict()`) and tokenizer.

    The template decides, since prompts and answers take its form: many models of Llama's architecture talk like Qwen.
    The architecture decides only where a template says nothing about tools, but is otherwise the family's.
    """
    kind = _family(config, tokenizer.template(tools=True) or "")
    return kind(tokenizer, tool_order=tool_order, template_args=template_args)


def _family(config: Mapping[str, Any], template: str) -> type[GenericAdapter]:
    for adapter, features in _TEMPLATES:
        if all(feature in template for feature in features):
            return adapter
    text = config.get("text_config")
    described = [config, text] if isinstance(text, Mapping) else [config]
    names = [
        str(name).lower()
        for part in described
        for name in (part.get("model_type"), *(part.get("architectures") or ()))
        if name
    ]
    for adapter, architectures, feature in _ARCHITECTURES:
        if feature in template and any(name.startswith(architectures) for name in names):
            return adapter
    return GenericAdapter
