"""cuDNN's attention, which steps do without. The switch is torch's own, and there without CUDA, too."""

from __future__ import annotations

import threading

import torch

from keepwarm.runtime.dispatch import CUDNN


def test_the_switch_is_turned_back_by_the_last_who_leaves() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with CUDNN.unused():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with CUDNN.unused():
        thread.start()
        entered.wait(10)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "the other is still inside"
    leave.set()
    thread.join()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
