"""Which device and which dtype a model gets. Imports no transformers: `keepwarm doctor` asks, too."""

from __future__ import annotations

import torch

from keepwarm.errors import ConfigError
from keepwarm.runtime.native.build import level


def device_of(asked: str | None) -> torch.device:
    """Return the requested device, or the first available of cuda, mps and cpu. Raises ConfigError."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked is None:
        return torch.device(next(name for name, there in present.items() if there))
    if not present.get(asked.partition(":")[0]):
        names = ", ".join(name for name, there in present.items() if there)
        raise ConfigError(f"device {asked!r} is not here; present are {names}: name one of these, or leave it out")
    return torch.device(asked)


def dtype_of(asked: str | None, device: torch.device) -> torch.dtype:
    """Return the requested dtype; else bfloat16 if the hardware computes in it, else float16 (GPUs) or float32."""
    if asked is not None:
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if level().narrow else torch.float32  # the level's: machines of one level share their KV
