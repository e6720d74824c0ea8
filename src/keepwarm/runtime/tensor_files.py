"""The tensors of a folder's safetensors files, as parts of memory maps of them.

The maps are our own, so that their pages can be given back once the weights are packed.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.checkpoint import is_of_text, name_alone

COMPUTED = ".rotary_emb.inv_freq"  # older folders hold what the model computes itself
_RENAMED = ".block_sparse_moe.", ".mlp."  # as transformers 5 does with Mixtral's
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SIZE = 8  # bytes of the header's length
_MOST_HEADER = 100 << 20  # as the format says
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError, SafetensorError)


@dataclass(frozen=True)
class Tensors:
    """Tensors by name, and the maps that they lie in."""

    found: Mapping[str, torch.Tensor]
    maps: tuple[mmap.mmap, ...]

    @classmethod
    def of(cls, folder: Path) -> Tensors:
        """Open a folder's files. Raises UnsupportedModel for such as are missing or not whole."""
        found: dict[str, torch.Tensor] = {}
        maps = []
        for path in _files(folder):
            try:
                opened, tensors = _open(path)
            except (OSError, *_DAMAGE) as error:
                raise UnsupportedModel(
                    f"{path} is not a whole safetensors file ({error}): fetch it again, and compare its checksum"
                ) from error
            maps.append(opened)
            found |= tensors
        return cls(found, tuple(maps))


def named_as_in_model(
    folder: Path, found: Mapping[str, torch.Tensor], *, is_part: bool
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return a folder's names and tensors by their names in the model. If this `is_part` of what the folder holds, the
    other parts' tensors are left out. Raises UnsupportedModel for a name that is there twice."""
    named: dict[str, tuple[str, torch.Tensor]] = {}
    for theirs, tensor in found.items():
        name = (name_alone(theirs) if is_part else theirs).replace(*_RENAMED)
        if is_part and not is_of_text(name):
            continue
        if name in named:
            raise UnsupportedModel(f"{folder} has {theirs} twice, the other one as {name}. Fetch the folder again")
        named[name] = theirs, tensor
    return named


def has_own_head(named: Mapping[str, tuple[str, torch.Tensor]]) -> bool:
    """Whether a folder has a head that is not the table of embeddings, whatever its configuration says."""
    head, table = (
        named[name][1] if name in named else None for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if head is None or table is None:
        return any(name.startswith("lm_head.") for name in named)
    return head.dtype != table.dtype or not torch.equal(head, table)


def _files(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():  # as transformers chooses
        return [whole]
    try:
        return sorted({folder / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, *_DAMAGE) as error:
        raise UnsupportedModel(f"{index} cannot be read ({error}): fetch it again") from error


def _open(path: Path) -> tuple[mmap.mmap, dict[str, torch.Tensor]]:
    with path.open("rb") as file:
        opened = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(opened[:_SIZE], "little")
    start = _SIZE + length
    if length > _MOST_HEADER or start > len(opened):
        raise ValueError("it ends early, or is of another format")
    header: dict[str, Any] = json.loads(opened[_SIZE:start])
    header.pop("__metadata__", None)
    with safe_open(path, "pt"):  # it checks that the tensors fill the file
        pass
    return opened, {name: _tensor(opened, start, name, told) for name, told in header.items()}


def _tensor(opened: mmap.mmap, start: int, name: str, told: Mapping[str, Any]) -> torch.Tensor:
    begin, end = told["data_offsets"]
    shape, dtype = told["shape"], _DTYPES.get(told["dtype"])
    if dtype is None:
        raise ValueError(f"{name} is in {told['dtype']}")
    count = prod(shape)
    if (
        not 0 <= begin <= end <= len(opened) - start
        or end - begin != count * dtype.itemsize
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"it ends early, or has another size than it says of {name}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    if (start + begin) % dtype.itemsize:  # a file that does not align its tensors: this one is copied
        held = torch.frombuffer(opened, dtype=torch.uint8, count=end - begin, offset=start + begin)
        return held.clone().view(dtype).reshape(shape)
    return torch.frombuffer(opened, dtype=dtype, count=count, offset=start + begin).reshape(shape)
