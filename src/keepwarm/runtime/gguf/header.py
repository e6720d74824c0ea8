"""What a GGUF file says before its weights: metadata, names of tensors, the model's configuration, the tokenizer.

transformers reads both, but parses a file with gguf's reader each time. That makes two objects of every word of the
vocabulary and of every merge, which takes seconds and hundreds of megabytes for each of three readings. Here the file
is parsed once, arrays are stepped over, and transformers' own tables say what the values mean to it.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from keepwarm.runtime.gguf.architectures import architecture_of

_LENGTH = struct.Struct("<Q")
_WHOLE = (GGUFValueType.INT32, GGUFValueType.UINT32, GGUFValueType.INT64, GGUFValueType.UINT64)


class Reader(GGUFReader):
    """gguf's reader, which leaves arrays of the metadata unread: `length` tells how long they are.

    Raises ValueError, where a file ends early.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Read bytes. Raises ValueError after the file's end, where the library's own function returns less than was
        asked for."""
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != int(count):
            raise ValueError("it ends early")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        size = self._size_of(GGUFValueType(kind[0]), int(count[0]), start)
        self._get(start, np.uint8, size)  # raises ValueError if the file ends before
        return 12 + size, [kind, count], [], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]

    @property
    def map(self) -> mmap.mmap:
        """The file's memory map."""
        found: mmap.mmap = self.data._mmap  # type: ignore[attr-defined]
        return found

    def _size_of(self, kind: GGUFValueType, count: int, start: int) -> int:
        """The bytes of an array's values."""
        if kind in self.gguf_scalar_to_np:
            return count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        if kind != GGUFValueType.STRING:
            raise ValueError(f"it has an array of {kind.name}: expected numbers or texts")
        memory, at = memoryview(self.map), start
        try:
            for _ in range(count):
                at += 8 + _LENGTH.unpack_from(memory, at)[0]
        except struct.error:
            raise ValueError("it ends early") from None
        return at - start

    def value(self, name: str) -> Any:
        """A number or a text of the metadata; None if it is not there, or an array."""
        field = self.fields.get(name)
        return None if field is None or field.types[0] == GGUFValueType.ARRAY else field.contents()

    def length(self, name: str) -> int | None:
        """How many values an array of the metadata has; None if it is not there."""
        field = self.fields.get(name)
        return None if field is None or field.types[0] != GGUFValueType.ARRAY else int(field.parts[-1][0])

    def numbers(self, name: str) -> list[int]:
        """Whole numbers of the metadata. Raises KeyError if the array is not there, ValueError if it holds others."""
        parts = self.fields[name].parts
        kind, count = GGUFValueType(int(parts[-2][0])), parts[-1]
        if self.fields[name].types[0] != GGUFValueType.ARRAY or kind not in _WHOLE:
            raise ValueError(f"{name} is no array of whole numbers")
        start = count.ctypes.data - self.data.ctypes.data + count.nbytes
        return [int(each) for each in self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))]

    def everything(self) -> dict[str, Any]:
        """The metadata. Arrays of texts and of fractions are represented by their lengths."""
        found: dict[str, Any] = {}
        for name in self.fields:
            found[name] = self.value(name)
            if found[name] is None:
                try:
                    found[name] = self.numbers(name)
                except ValueError:
                    found[name] = self.length(name)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.tensors)


def read_config(reader: Reader) -> PreTrainedConfig:
    """The configuration that a file's metadata makes. Raises KeyError for an unknown architecture."""
    own, name = architecture_of(reader), reader.value("general.architecture")
    told: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in reader.names}
    table = own.names or name
    told |= GGUF_CONFIG_DEFAULTS_MAPPING.get(table) or {}
    for group, of in ((name, table), ("tokenizer", "tokenizer"), ("general", "general")):
        named = {renamed: reader.value(f"{group}.{key}") for key, renamed in _renamed(of)}
        told |= {renamed: value for renamed, value in named.items() if value is not None}
    if (words := reader.length("tokenizer.ggml.tokens")) is not None:
        told.setdefault("vocab_size", words)
    told |= {"model_type": own.model_type or name} | own.told(reader)
    made: PreTrainedConfig = CONFIG_MAPPING[told["model_type"]].from_dict(told)
    return made


def _renamed(table: str) -> list[tuple[str, str]]:
    """The names of metadata in a table of transformers, with what its configurations call them."""
    names: dict[str, dict[str, Any]] = GGUF_TO_TRANSFORMERS_MAPPING["config"]  # type: ignore[assignment]
    return [(key, renamed) for key, renamed in names.get(table, {}).items() if isinstance(renamed, str)]


def read_tokenizer(path: Path, config: PreTrainedConfig) -> Any:
    """The file's own tokenizer, of the class that transformers has for the configuration."""
    kind: Any = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if kind.__name__ == "MistralCommonBackend":  # where mistral_common is installed; it reads no GGUF file
        kind = PreTrainedTokenizerFast
    return kind.from_pretrained(path.parent, gguf_file=path.name)
