"""Qwen 2, 2.5 and 3, and models with the same format (Hermes): `<tools>` in the system prompt, `<tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepwarm.core.identity import json_text
from keepwarm.models import toolcalls
from keepwarm.models.generic import GenericAdapter


class QwenAdapter(GenericAdapter):
    """Turns reasoning off where the template has a switch for it (`enable_thinking`)."""

    forms = (toolcalls.tagged, toolcalls.bare)  # small Qwen2.5 models leave the tags out
    ends = ("<|im_end|>", "<|endoftext|>")

    @property
    def written(self) -> toolcalls.Written:
        return toolcalls.Written(
            open="<tool_call>\n",
            close="\n</tool_call>",
            between="\n</tool_call>\n<tool_call>\n",
            markers=("<tool_call>", "</tool_call>"),
        )

    def template_defaults(self) -> dict[str, Any]:
        switch = {"enable_thinking": False} if "enable_thinking" in self._variables else {}
        return super().template_defaults() | switch

    def tools_text(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        lines = "\n".join(map(json_text, schemas))
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
