"""An open GGUF file, of which is known that it is whole and runs here. Imports no transformers: `keepwarm doctor` asks,
too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType

from keepwarm.errors import UnsupportedModel
from keepwarm.models.places import gguf_parts
from keepwarm.runtime.gguf.architectures import ARCHITECTURES, architecture_of
from keepwarm.runtime.gguf.reader import Reader
from keepwarm.runtime.native.blocks import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_ROTARY = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.dimension_count"),
    *("attention.key_length", "attention.head_count", "embedding_length"),
)
_MAGIC = b"GGUF"  # how a GGUF file begins
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"  # of a model that is split
_MOST_EXPERTS, _WIDEST = 1024, 1 << 16
_WIDE = (
    *("attention.head_count", "attention.key_length", "attention.key_length_swa"),
    *("rope.dimension_count", "embedding_length_per_layer_input"),
)
_POSITIVE = (
    *("embedding_length", "attention.head_count", "context_length", "rope.freq_base", "rope.freq_base_swa"),
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
)
_POSITIVE_IF_SCALED = ("rope.scaling.factor",)
_FINITE = "attention.temperature_scale"
_BY_LENGTH = "rope_factors_long.weight"  # a tensor: rotary frequencies change with the sequence's length
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, TypeError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class File:
    """An open GGUF file, or the first of those into which a model is split. Its tensors are parts of memory maps."""

    path: Path
    reader: Reader

    @classmethod
    def open(cls, path: Path) -> File:
        """Open a file; of a model that is split, all files, whichever is named. Raises UnsupportedModel if one is no
        GGUF file, or not complete."""
        reader = _opened(path)
        with _whole(path):
            if (count := reader.value(_COUNT) or 1) > 1:
                path, reader = _joined(path, reader, count)
        found = cls(path, reader)
        with _whole(path):
            found._check()
        return found

    @property
    def has_template(self) -> bool:
        """Whether the file has a chat template."""
        return self.reader.value("tokenizer.chat_template") is not None

    @property
    def architecture(self) -> str:
        return str(self.reader.value("general.architecture"))

    def config(self) -> PreTrainedConfig:
        """The model's configuration. Raises UnsupportedModel for metadata that do not make one."""
        from keepwarm.runtime.gguf.header import read_config  # imports transformers

        try:
            return read_config(self.reader)
        except KeyError as error:
            raise UnsupportedModel(f"{self.path} does not say what its model is: {error.args[0]}") from error
        except Exception as error:  # transformers checks values in many ways
            raise UnsupportedModel(f"{self.path} does not load: {error}") from error

    def _check(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} holds a model of the architecture {self.architecture!r}; Keepwarm runs GGUF files of "
                f"{', '.join(ARCHITECTURES)}. Pass the model's folder with safetensors"
            )
        _check_order(self.path, self.reader)
        self._check_sizes()
        self._check_numbers()
        self._check_rotary()
        if self.reader.length("tokenizer.ggml.tokens") is None:
            raise UnsupportedModel(f"{self.path} holds no tokenizer; expected tokenizer.ggml.* in its metadata")
        self._check_types()

    def _check_sizes(self) -> None:
        """Refuse numbers for which a model would take much memory before a tensor is found missing."""
        most = {"block_count": len(self.reader.tensors), "expert_count": _MOST_EXPERTS}
        most |= dict.fromkeys(_WIDE, _WIDEST)
        for key, limit in most.items():
            found = self.reader.value(f"{self.architecture}.{key}")
            if found is not None and not 0 <= found <= limit:
                raise UnsupportedModel(f"{self.path} says {self.architecture}.{key} is {found}; expected up to {limit}")

    def _check_numbers(self) -> None:
        """Refuse numbers with which nothing finite is computed."""
        scaled = self.reader.value(f"{self.architecture}.rope.scaling.type") not in (None, "none")
        for key in (*_POSITIVE, *(_POSITIVE_IF_SCALED if scaled else ())):
            found = self.reader.value(f"{self.architecture}.{key}")
            if found is not None and not (isinstance(found, int | float) and 0 < found < math.inf):
                raise UnsupportedModel(
                    f"{self.path} says {self.architecture}.{key} is {found}; expected a number above 0"
                )
        found = self.reader.value(f"{self.architecture}.{_FINITE}")
        if found is not None and not (isinstance(found, int | float) and math.isfinite(found)):
            raise UnsupportedModel(f"{self.path} says {self.architecture}.{_FINITE} is {found}; expected a number")

    def _check_rotary(self) -> None:
        told = {name: self.reader.value(f"{self.architecture}.{name}") for name in _ROTARY}
        known = architecture_of(self.reader)
        kind = told["rope.scaling.type"]
        scaled = kind not in (None, "none") or any(
            told[name] not in (None, 0, 1) for name in ("rope.scaling.factor", "rope.scale_linear")
        )
        heads, rotated = told["attention.head_count"], told["rope.dimension_count"]
        width = told["attention.key_length"] or (told["embedding_length"] or 0) // (heads or 1)
        if (
            (scaled and kind not in known.scaled)
            or (rotated not in (None, width) and not known.partial)
            or any(each.name == _BY_LENGTH for each in self.reader.tensors)
        ):
            raise UnsupportedModel(
                f"{self.path} scales its rotary embedding or applies it to a part of each head ({told}), which is not "
                "read from GGUF files; pass the model's folder with safetensors"
            )

    def _check_types(self) -> None:
        known = {*KINDS, *(kind.name for kind in FLOATS)}
        others = [each for each in self.reader.tensors if each.tensor_type.name not in known]
        if others:
            kinds = ", ".join(sorted({each.tensor_type.name for each in others}))
            raise UnsupportedModel(
                f"{self.path} has weights of the type {kinds} ({others[0].name} and {len(others) - 1} more); the "
                f"kernels have {', '.join(KINDS)}, F16, BF16 and F32. Quantize it to one of these (llama-quantize), or "
                "pass the model's folder with safetensors"
            )


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Say of errors that a file's bytes lead to which file it is, and what to do."""
    try:
        yield
    except UnsupportedModel:
        raise
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    except _DAMAGE as error:
        raise UnsupportedModel(
            f"{path} is not a whole GGUF file ({error}): fetch it again, and compare its checksum"
        ) from error


def _opened(path: Path) -> Reader:
    with _whole(path):
        with path.open("rb") as opened:
            begins = opened.read(len(_MAGIC))
        if begins != _MAGIC:
            raise UnsupportedModel(
                f"{path} is no GGUF file: it begins with {begins!r}, expected {_MAGIC!r}. Fetch it again"
            )
        return Reader(path, "c")


def _joined(path: Path, reader: Reader, count: int) -> tuple[Path, Reader]:
    """Open the other files of a model that is split, of which one is open. Return the first one, with all tensors."""
    files = gguf_parts(path)
    if len(files) != count:
        ending = f"-{(reader.value(_NUMBER) or 0) + 1:05d}-of-{count:05d}.gguf"
        raise UnsupportedModel(
            f"{path} is one of {count} files with one model by what it holds, and its name does not end in {ending}: "
            "give the files their own names again, side by side"
        )
    if absent := [file.name for file in files if not file.is_file()]:
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        raise UnsupportedModel(
            f"{path} is one of {count} files with one model, and {absent[0]}{more} is not beside it: fetch it"
        )
    first, *others = (reader if file == path else _opened(file) for file in files)
    for number, (file, each) in enumerate(zip(files, (first, *others), strict=True)):
        told = each.value(_NUMBER), each.value(_COUNT)
        if told != (number, count):
            part = told[0] + 1 if isinstance(told[0], int) else None
            raise UnsupportedModel(
                f"{file} says it is part {part} of {told[1]}, and by its name it is {number + 1} of {count}: give the "
                "files their own names again, or fetch them again"
            )
        _check_order(file, each)
    first.join(tuple(others))
    if (expected := first.value(_TENSORS)) is not None and expected != len(first.tensors):
        raise UnsupportedModel(
            f"{files[0]} and the {count - 1} after it have {len(first.tensors)} tensors; expected {expected}: they are "
            "of different models"
        )
    if twice := [name for name, times in Counter(first.names).items() if times > 1]:
        raise UnsupportedModel(f"{files[0]} and the {count - 1} after it have {twice[0]} twice")
    return files[0], first


def _check_order(path: Path, reader: Reader) -> None:
    if reader.byte_order != "I":
        raise UnsupportedModel(f"{path} has another byte order than this machine: convert it")
