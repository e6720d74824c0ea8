"""The connector as on a GPU, under vLLM's CPU build: its pages belong to a device whose copies land late.

vLLM computes at once, as if its stream were always done. A copy lands when something waits for it, or a little later:
each step the device does one piece of what it was given.
"""

from __future__ import annotations

from typing import Any

import torch

from keepwarm.integrations.vllm.connector import KeepwarmConnector
from keepwarm.runtime import device
from keepwarm.testing.device import AdversarialPort

PORT = AdversarialPort()


def _port(_: torch.device) -> AdversarialPort:
    return PORT


device.PORTS["cpu"] = _port  # is not the host's: it has no `is_host`


class LateConnector(KeepwarmConnector):
    """Takes vLLM's memory as the late device's."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        storages = {view.untyped_storage().data_ptr(): view for view in kv_caches.values()}
        self._adopted = [PORT.adopt(view) for view in storages.values()]
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        for stream in PORT.busy():
            stream.advance()
        assert PORT.faults == []
        return super().get_transfer_results(finished_req_ids)
