"""A tokenizer whose tokens are letters: few enough of them for the smallest of models."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.helpers.templates import TEMPLATES

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@cache
def letters() -> Any:
    """Ids 0 to 98: three special tokens, and then what can be printed."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    known = {text: number for number, text in enumerate([*_SPECIAL, *_LETTERS])}
    backend = Tokenizer(WordLevel(known, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=_SPECIAL[0], eos_token=_SPECIAL[2], additional_special_tokens=_SPECIAL[1:2]
    )
    made.chat_template = TEMPLATES["native"]
    return made
