"""Devices that hold KV, and the port to each device's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.device.copies import Copies as Copies
from keepwarm.runtime.device.cuda import CudaPort
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.device.mps import MpsPort
from keepwarm.runtime.device.port import DevicePort as DevicePort
from keepwarm.runtime.device.port import Event as Event
from keepwarm.runtime.device.port import Memory as Memory
from keepwarm.runtime.device.port import Stream as Stream

# By torch's name of the kind. Tests replace the processor with an adversarial device (`testing.device`).
PORTS: dict[str, Callable[[torch.device], DevicePort]] = {"cpu": HostPort, "cuda": CudaPort, "mps": MpsPort}


def is_host(kind: str) -> bool:
    """Whether devices of this kind have the host's memory, so that it is read and written in place."""
    return bool(getattr(PORTS.get(kind), "is_host", False))


def port_to(device: torch.device) -> DevicePort:
    """Return a port to a device, with its own streams. Raises UnsupportedModel for a kind of device without a port."""
    if device.type not in PORTS:
        raise UnsupportedModel(
            f"the model is on {str(device)!r}, and KV is kept on {', '.join(PORTS)}: move the model to one of these"
        )
    return PORTS[device.type](device)
