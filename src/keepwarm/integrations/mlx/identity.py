"""What mlx-lm's KV depends on: the model's files, adapters, the form of its caches, the libraries and the device."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, as_json, canonical_json, json_digest
from keepwarm.errors import ConfigError
from keepwarm.integrations.mlx.form import Form, Quantization
from keepwarm.integrations.weights import weights_folder
from keepwarm.models.weight_files import files_digest, folder_digest

FORM = 1  # format of the bytes in the store
_ELSEWHERE = re.compile(r"MLX_(RANK|HOSTFILE|WORLD|RING|IBV|JACCL|NCCL)")  # variables that select no kernels
_NOISE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Loaded:
    """A model as mlx-lm loaded it: the model, the folder or hub id that it came from, and what else was asked for."""

    model: Any
    path: str
    adapter_path: str | None = None
    draft_path: str | None = None
    quantization: Quantization | None = None

    @property
    def key(self) -> tuple[str, str | None, str | None]:
        """The key that mlx-lm's server gives to this model's prompts."""
        return self.path, self.adapter_path, self.draft_path

    def is_same(self, other: Loaded) -> bool:
        """Whether this is the same object of a model, loaded from the same place."""
        return (self.model is other.model, self.key, self.quantization) == (True, other.key, other.quantization)


def namespace_of(loaded: Loaded, form: Form) -> Namespace:
    """Return the namespace of a model's prompts in one form. Raises ConfigError when its files cannot be read."""
    cache = cache_dir() / "identity.json"
    folder = weights_folder(loaded.path)
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = folder_digest(folder, cache)
        code = files_digest(sorted([*folder.glob("*.py"), *folder.glob("hf_quant_config.json")]), cache)
        lora = _adapter(loaded.adapter_path, cache)
        libraries = {"mlx": mx.__version__, "mlx-lm": mlx_lm.__version__, "files": files_digest(_libraries(), cache)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of {loaded.path!r} cannot be read to be identified: {error}") from None
    asked = loaded.quantization
    layout = {
        "form": FORM,
        "leaves": json_digest("keepwarm mlx leaves 1", form.describe()),
        "kv_bits": [asked.bits, asked.group_size, asked.start] if asked is not None else None,
    }
    described = as_json({name: value for name, value in config.items() if name not in _NOISE})
    model = ModelIdentity(
        weights=weights,
        config=json_digest("keepwarm mlx config 1", {"config": described, "code": code}),
        dtype=form.dtype,
        quantization=canonical_json(as_json(config["quantization"])) if config.get("quantization") else "none",
        rope=canonical_json({name: value for name, value in described.items() if name.startswith("rope")}),
        tokenizer="ids",  # KV belongs to token ids; their text is the library's concern
        lora=lora,
        kv_layout=canonical_json(layout),
    )
    return Namespace(model, _arithmetic(canonical_json(libraries)))


def _arithmetic(libraries: str) -> ArithmeticIdentity:
    device, told = mx.default_device(), mx.device_info()
    switches = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MLX_") and not _ELSEWHERE.match(k)}
    return ArithmeticIdentity(
        torch="",
        device="cpu" if device.type == mx.cpu else str(device),
        instruction_set=f"{platform.machine()} {told.get('architecture', '')} {told.get('device_name', '')}",
        threads=0,  # MLX guarantees no bits, so the number of threads does not count
        attention="mlx",
        libraries=libraries,
        environment=canonical_json(switches),
        producer=f"mlx-lm {mlx_lm.__version__}",
    )


def _adapter(path: str | None, cache: Path) -> str:
    if path is None:
        return "none"
    folder = weights_folder(path)
    return files_digest(sorted(each for each in folder.iterdir() if each.is_file()), cache)


def _libraries() -> list[Path]:
    """Return MLX's compiled files."""
    module = Path(mx.__file__)
    return sorted({module, *(each for each in (module.parent / "lib").glob("libmlx*") if each.is_file())})
