"""Any change of a loaded model is noticed, by the compiled look and by the plain one."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from keepwarm.runtime.native.build import WATCH, compiled
from keepwarm.runtime.watch import Elsewhere, WeightWatch


def _model() -> nn.Module:
    torch.manual_seed(0)
    few = nn.Sequential(nn.Linear(64, 40), nn.BatchNorm1d(40))
    normed = nn.LayerNorm(64)
    normed.register_buffer("scale", torch.ones(5), persistent=False)
    return nn.Sequential(nn.Linear(64, 64), normed, few, nn.Linear(40, 3, dtype=torch.float64))


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and compiled(WATCH) is None:
        pytest.skip("no compiler here")
    return bool(request.param)


def _swap_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def _write_behind(model: nn.Module) -> None:
    model[2][0].weight.data[0, 0] += 1


def _write_in_the_middle(model: nn.Module) -> None:
    model[0].weight.data[32, 5] = 7


def _negate(model: nn.Module) -> None:
    model[3].weight.data.neg_()


def _small(model: nn.Module) -> None:
    model[3].bias.data.mul_(2)


def _same_value_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach())


def _into_the_table(model: nn.Module) -> None:
    model[0]._parameters["bias"] = nn.Parameter(model[0].bias.detach())


def _replace_module(model: nn.Module) -> None:
    model[2] = nn.Sequential(*model[2])


def _add_module(model: nn.Module) -> None:
    model.append(nn.ReLU())


def _remove_module(model: nn.Module) -> None:
    del model[2]


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].weight[3] += 1e-6


def _buffer(model: nn.Module) -> None:
    model[2][1].running_mean.add_(1)


def _computed(model: nn.Module) -> None:
    model[1].scale.mul_(2)


def _computed_behind(model: nn.Module) -> None:
    model[1].scale.data.mul_(2)


def _computed_exchanged(model: nn.Module) -> None:
    model[1].scale = model[1].scale * 2


CHANGES = [
    _swap_data,
    _write_behind,
    _write_in_the_middle,
    _negate,
    _small,
    _same_value_parameter,
    _into_the_table,
    _replace_module,
    _add_module,
    _remove_module,
    _in_place,
    _buffer,
    _computed,
    _computed_behind,
    _computed_exchanged,
]


BEHIND = [_write_behind, _write_in_the_middle, _negate, _small, _computed_behind]


@pytest.mark.parametrize("change", BEHIND, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_lies_on_a_device_is_compared_there(device: str, change: Callable[[nn.Module], None]) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    model = _model().to(device)
    looks = Elsewhere(torch.device(device), [*model.parameters(), *model.buffers()])
    watch = WeightWatch(model)
    for _ in range(3):
        assert not looks.changed()
        assert not watch.changed()
    change(model)
    assert looks.changed()
    assert watch.changed()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_noticed(native: bool, change: Callable[[nn.Module], None]) -> None:
    model = _model()
    watch = WeightWatch(model, native=native)
    for _ in range(3):
        assert not watch.changed()
    change(model)
    assert watch.changed()
    assert not WeightWatch(model, native=native).changed()


def test_what_is_looked_at_outlives_an_exchange(native: bool) -> None:
    """Memory that was given back to the system must not be read."""
    model, data = _model(), np.ones((64, 64), np.float32)
    model[0].weight = nn.Parameter(torch.from_numpy(data))
    there = weakref.ref(data)
    del data
    watch = WeightWatch(model, native=native)
    model[0].weight.data = torch.zeros(64, 64)
    gc.collect()
    assert there() is not None
    assert watch.changed()
    del watch
    gc.collect()
    assert there() is None


def test_use_is_no_change(native: bool) -> None:
    model = _model().eval()
    watch = WeightWatch(model, native=native)
    kept = [*model.parameters()]
    model[:3](torch.randn(3, 64)).sum().backward()
    model[0].extra = "a note"  # type: ignore[assignment]
    assert not watch.changed()
    assert all(each.grad is not None for each in kept[:-2])
