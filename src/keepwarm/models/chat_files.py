"""Chat templates in a checkpoint's files, found without its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

OF_PROCESSORS = ("chat_template.json", "processor_config.json")  # a processor of pictures or sound may keep it there
_OF_TOKENIZERS = "tokenizer_config.json"
_BY_ITSELF = ("chat_template.jinja", "tekken.json")  # files that are a template, or bring one


def template_in(file: Path) -> str | dict[str, str] | None:
    """Return the chat template in a file of JSON, or several by name; None if it has none. Raises ValueError for one
    that is no text, and for a file that is no JSON."""
    try:
        told = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file.name} is no JSON ({error}). Fetch it again") from None
    template = told.get("chat_template") if isinstance(told, dict) else None
    if isinstance(template, list):  # as tokenizers list several
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    texts = template.values() if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"the chat_template in {file.name} is of type {type(template).__name__}; expected a text, or texts by name"
        )
    found: str | dict[str, str] | None = template
    return found


def has_template(folder: Path) -> bool:
    """Return whether a folder has a chat template. Raises what `template_in` does, and OSError."""
    if any((folder / name).exists() for name in _BY_ITSELF):
        return True
    files = (folder / name for name in (_OF_TOKENIZERS, *OF_PROCESSORS))
    return any(template_in(file) for file in files if file.is_file())
