"""Tokens chosen on a device: the same as on the host, and no more than their ids comes to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import away
from tests.helpers.models import tiny
from tests.helpers.prompts import ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TopPLogitsWarper

from keepwarm import Batcher, Engine
from keepwarm.core.blocks import token_ids
from keepwarm.core.request import Decoding
from keepwarm.runtime import device, sampling
from keepwarm.runtime.sampling import Nucleus, Sampler, fetched
from keepwarm.testing.device import AdversarialPort

CHOICES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {7: 3.5, 9: -2.0}, "repetition_penalty": 1.2, "min_tokens": 5},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 1.3, "seed": 5, "top_p": 0.8, "min_p": 0.02},
]


@pytest.fixture
def by_multinomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host draws as devices do, and as torch does: a number for every token."""

    def draw(shares: torch.Tensor, generator: torch.Generator | None) -> int:
        return int(torch.multinomial(shares, 1, generator=generator))

    monkeypatch.setattr(sampling, "drawn", draw)


@pytest.mark.usefixtures("by_multinomial")
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: ", ".join(choice) or "greedy")
def test_a_device_chooses_what_the_host_does(choice: dict[str, Any]) -> None:
    rows = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)).bfloat16()  # has equal ones
    found = []
    for port in (device.HostPort(), AdversarialPort()):
        sampler = Sampler(Decoding(**choice), token_ids(ids(30, 1)), port, ends=frozenset({11}))
        found.append([fetched([sampler.choose(row)])[0].token for row in rows])
    assert found[0] == found[1]


@pytest.mark.parametrize("port", [device.HostPort(), AdversarialPort()], ids=["host", "device"])
def test_nothing_is_drawn_from_what_is_no_number(port: device.DevicePort) -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(1))
    row[7] = torch.nan
    sampler = Sampler(Decoding(temperature=1.0, seed=1), token_ids(ids(30, 1)), port)
    with pytest.raises(RuntimeError, match="probability"):
        sampler.take(fetched([sampler.choose(row)])[0].token)


def test_a_token_without_a_share_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a device's random numbers can be 0."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda times, **_: times.zero_())
    row = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(Decoding(temperature=1.0, seed=1, top_k=1), token_ids(ids(30, 1)), AdversarialPort())
    assert fetched([sampler.choose(row)])[0].token == row.argmax()


@settings(max_examples=100, deadline=None)
@given(
    top_p=st.one_of(st.floats(0.001, 0.9999), st.sampled_from([0.5, 0.95, 1.0])),
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3000),
    width=st.sampled_from([0.0, 0.1, 1.0, 6.0]),
)
def test_the_nucleus_is_that_of_transformers(top_p: float, seed: int, count: int, width: float) -> None:
    """But for tokens at its edge, where sums of float32 are rounded, and among equal ones."""
    scores = torch.randn(1, count, generator=torch.Generator().manual_seed(seed)) * width
    scores[0, :: 1 + seed % 7] = -torch.inf
    scores[0, -1] = 0.5
    none = torch.zeros((1, 0), dtype=torch.int64)
    ours, theirs = Nucleus(top_p)(none, scores), TopPLogitsWarper(top_p)(none, scores)  # type: ignore[arg-type]
    shares = scores.double().softmax(-1)
    assert float(shares[ours > -torch.inf].sum()) >= min(top_p, 1) - 1e-5
    mine, other = (shares[found > -torch.inf].sort(descending=True).values for found in (ours, theirs))
    edge = float(mine[-1])
    assert abs(float(mine.sum() - other.sum())) <= edge + 1e-5
    assert torch.allclose(mine[: len(other)], other[: len(mine)])
    assert torch.equal(ours[ours > -torch.inf], scores[ours > -torch.inf])


class CountingPort(AdversarialPort):
    """Counts what is brought to it."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.brought = 0

    def upload(self, array: Any) -> torch.Tensor:
        self.brought += 1
        return super().upload(array)


def asked(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    more = {"response_schema": schema, "logprobs": 2}
    return (
        {"max_new_tokens": 12, "trace": True, "ignore_eos": True, **CHOICES[number]}
        if number < len(CHOICES)
        else {"max_new_tokens": 12, "trace": True, **more}
    )


@pytest.mark.usefixtures("by_multinomial")
def test_answers_off_the_host_are_those_on_it(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Alone and in a batch, with a form to keep to and with log-probabilities; and no id is brought to the device but
    the prompt's."""
    monkeypatch.setitem(device.PORTS, "cpu", device.HostPort)
    numbers = range(len(CHOICES) + 1)
    settings: dict[str, Any] = {"step": 64, "attention": "model"}
    with Engine.from_pretrained((tiny("llama"), tokenizer), **settings) as engine:
        host = [engine.generate(ids(40, 2), **asked(number)) for number in numbers]
    port = CountingPort(torch.device("cpu"))
    monkeypatch.setitem(device.PORTS, "cpu", lambda _: port)
    with Engine.from_pretrained((tiny("llama"), tokenizer), **settings) as engine, Batcher(engine) as batcher:
        alone = [engine.generate(ids(40, 2), **asked(number)) for number in numbers]
        tickets = [batcher.submit(ids(40, 2), **asked(number)) for number in numbers]
        together = [ticket.result(60) for ticket in tickets]
        port.brought = 0
        assert len(engine.generate(ids(40, 2), max_new_tokens=12, ignore_eos=True).token_ids) == 12
        assert port.brought == 1, "the prompt's last step"
    for found in (alone, together):
        assert [each.token_ids for each in found] == [each.token_ids for each in host]
        assert [each.logits_digest for each in found] == [each.logits_digest for each in host]
        assert [each.logprobs for each in found] == [each.logprobs for each in host]
    assert not port.faults


class Leaving(TorchDispatchMode):
    """Notes how many numbers each tensor has that leaves the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        given = args[0] if args else None
        if isinstance(given, away.Away) and (name == "aten::_local_scalar_dense" or not _is_there(found)):
            self.sizes.append(given.numel())
        return found


def _is_there(found: Any) -> bool:
    return not isinstance(found, torch.Tensor) or isinstance(found, away.Away)


@pytest.mark.parametrize("choice", CHOICES[:3], ids=lambda choice: ", ".join(choice) or "greedy")
def test_nothing_leaves_the_device_but_the_ids(choice: dict[str, Any]) -> None:
    """Of three requests, all at once."""
    away.register()
    samplers = [Sampler(Decoding(**choice), token_ids(ids(30, n)), away.AwayPort()) for n in range(3)]
    rows = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    there = away.Away(rows)
    with Leaving() as leaving:
        chosen = [sampler.choose(row) for sampler, row in zip(samplers, there, strict=True)]
        assert leaving.sizes == []
        found = fetched(chosen)
    assert leaving.sizes == [3], "ids"
    if not choice:
        assert [each.token for each in found] == np.argmax(rows.numpy(), 1).tolist()
