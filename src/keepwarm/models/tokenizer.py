"""A Hugging Face tokenizer behind the `Tokenizer` port."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from keepwarm.errors import TemplateError

Offsets = list[tuple[int, int]]


class HFTokenizer:
    """Ids with the characters each token covers, decoding, and the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # texts that split a prompt before anything else is tokenized: what stands before them cannot merge with them
        self.splitters = tuple(
            token.content
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.special and not token.lstrip and not token.normalized
        )
        self._fast = bool(getattr(tokenizer, "is_fast", False))

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], Offsets]:
        """Token ids, and the character range of each; no ranges from a tokenizer that cannot tell them."""
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=self._fast)
        ids: list[int] = encoded["input_ids"]
        return ids, list(encoded["offset_mapping"]) if self._fast else []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def template(self) -> str | None:
        """Source of the chat template; None when the tokenizer has none."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template if isinstance(template, str) else None

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The chat template's text. Raises TemplateError with the template's own words."""
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=self.template, **kwargs
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error
        return text


def cut_at(offsets: Offsets, char: int) -> int:
    """Number of leading tokens that end at or before character `char`: a token across it belongs to what follows."""
    return bisect_right(offsets, char, key=itemgetter(1))
