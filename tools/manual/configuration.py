"""The page of settings, from the fields of `EngineConfig` and `ServeConfig`, and from `when.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keepwarm.config import EngineConfig
from keepwarm.serving.settings import ServeConfig

_WHEN = Path(__file__).with_name("when.toml")

_HEAD = """# Configuration

Every setting, what it does, and when to change it. The defaults are meant to be right: change one when its last line
describes you.

- In Python the engine's settings are arguments: `Engine.from_pretrained(model, max_ram="8GiB")`.
- For commands and the service each is a variable: `KEEPWARM__ENGINE__MAX_RAM=8GiB`. Lists and tables are JSON.
- The service also reads a file: `keepwarm serve --config keepwarm.toml`, with a section for each heading below.

Options win over variables, and variables over the file. An unknown name or a wrong value is refused, and the message
says where it stands. `keepwarm config check` shows what is in force. Sizes are bytes, or texts such as `"4GiB"`.
"""


def sections() -> dict[str, type[BaseModel]]:
    """The sections of the service's file, in its order; the engine's is one of them."""
    found: dict[str, type[BaseModel]] = {"engine": EngineConfig}
    for name, field in ServeConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = kind
    (entry,) = [kind for kind in ServeConfig.model_fields["catalogue"].annotation.__args__ if kind is not ...]  # type: ignore[union-attr]
    return found | {"catalogue": entry}


def whens() -> dict[str, dict[str, str]]:
    """When to change a setting, by section and name."""
    return tomllib.loads(_WHEN.read_text(encoding="utf-8"))


def page() -> str:
    """The page in Markdown."""
    known = whens()
    parts = [_HEAD]
    for section, kind in sections().items():
        parts.append(f"## {_title(section)}\n\n{_intro(section, kind)}\n")
        for name, field in kind.model_fields.items():
            parts.append(_setting(section, name, field, known[section][name]))
        if section == "engine":
            top = ServeConfig.model_fields["model"]
            parts.append(_TOP.format(description=_sentence(top.description or "")))
    return "\n".join(parts)


_TOP = """## The service's model {{#model}}

`model = "demo"`, at the top of the file, above all sections; `KEEPWARM__MODEL`. {description}
"""


def _title(section: str) -> str:
    return "Engine" if section == "engine" else f"Service: `[{section}]`"


def _intro(section: str, kind: type[BaseModel]) -> str:
    if section == "engine":
        return "Arguments of `Engine.from_pretrained`, and the section `[engine]` of the service's file."
    if section == "catalogue":
        return f"{_first(kind)} Each entry is a table of its own: `[[catalogue]]`."
    return _first(kind)


def _first(kind: type[BaseModel]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _setting(section: str, name: str, field: FieldInfo, when: str) -> str:
    variable = f"KEEPWARM__{section}__{name}".upper()
    facts = [_kind(field), f"default {_default(field)}"]
    if section != "catalogue":
        facts.append(f"`{variable}`")
    return "\n".join([
        f"### `{name}` {{#{section}-{name.replace('_', '-')}}}",
        "",
        " · ".join(facts),
        "",
        _sentence(field.description or ""),
        "",
        f"*Change it* {when}",
        "",
    ])


def _sentence(text: str) -> str:
    """End with a full stop, and begin with a capital unless the first word is a value."""
    if re.match(r"[a-z]+(\s|;|$)", text):
        text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _kind(field: FieldInfo) -> str:
    """The type in words: what a reader may write."""
    text = str(field.annotation) if not isinstance(field.annotation, type) else field.annotation.__name__
    text = re.sub(r"(typing|pathlib|keepwarm\.config|pydantic\.types)\.", "", text)
    if text.startswith("Literal") or "Literal[" in text:
        values = re.findall(r"'([^']+)'", text)
        return " or ".join(f"`{value}`" for value in values)
    if text == "Reuse":
        return "`exact` or `prefix` or `chunks` or `off`"
    for name, words in _WORDS.items():
        text = text.replace(name, words)
    return text.replace(" | ", " or ")


_WORDS = {
    "tuple[SecretStr, ...]": "list of texts",
    "tuple[str, ...]": "list of texts",
    "tuple[Path, ...]": "list of files",
    "dict[str, Any]": "table",
    "Path": "path",
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "None": "none",
}
_BYTES = ("byte", "bytes ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: it must be given"
    value: Any = field.get_default(call_default_factory=True)
    if value is None or value == () or value == {}:
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and any(word in (field.description or "") for word in _BYTES):
        return f"`{value >> 30}GiB`" if value % (1 << 30) == 0 else f"`{value >> 20}MiB`"
    return f"`{value.value if hasattr(value, 'value') else value}`"


def undescribed() -> Iterator[str]:
    """Settings without a description or without a line of `when.toml`, and lines without a setting."""
    known = whens()
    for section, kind in sections().items():
        for name, field in kind.model_fields.items():
            if not field.description:
                yield f"{section}.{name} has no description"
            if name not in known.get(section, {}):
                yield f"{section}.{name} has no line in when.toml"
        for name in known.get(section, {}).keys() - kind.model_fields.keys():
            yield f"when.toml: {section}.{name} is no setting"
    yield from (f"when.toml: [{section}] is no section" for section in known.keys() - sections().keys())
