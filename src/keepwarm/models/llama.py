"""Llama 3.1 and later: tools in the first user message, one call per answer as `{"name": ..., "parameters": ...}`.

Its template prints the day's date; `GenericAdapter` pins `date_string`, or every key would change at midnight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepwarm.core.identity import json_text
from keepwarm.models import toolcalls
from keepwarm.models.generic import GenericAdapter


class LlamaAdapter(GenericAdapter):
    forms = (toolcalls.python_tag, toolcalls.bare)
    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    @property
    def written(self) -> toolcalls.Written:
        return toolcalls.Written(arguments="parameters", markers=("<|python_tag|>",))

    def tools_text(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        lines = "\n\n".join(map(json_text, schemas))
        return (
            "You have access to the following functions. To call one, respond with a JSON object of the form "
            '{"name": function name, "parameters": dictionary of argument name and its value}. '
            f"Do not use variables.\n\n{lines}"
        )
