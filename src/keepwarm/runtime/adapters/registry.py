"""The LoRA adapters of one model, by name: `Engine.adapters`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import json_digest
from keepwarm.core.lora import Lora
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.runtime.adapters.beside import beside
from keepwarm.runtime.adapters.peft_folder import read
from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.arena.form import CacheForm
from keepwarm.runtime.identity import tensors_digest
from keepwarm.runtime.native.description import NotCovered
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.low_rank import Low, PackedLora, Places
from keepwarm.runtime.native.proof import variance
from keepwarm.runtime.probe import Kept
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.stepping import Decoder

log = logging.getLogger(__name__)

_LONGEST = 200  # characters of a name


class Adapters:
    """LoRA adapters beside one model's weights. Threads may share it.

    A request that names one (`generate(adapter=...)`) keeps it to its end, whatever is loaded or removed meanwhile.
    """

    def __init__(self, runner: Runner, geometry: KVGeometry, form: CacheForm) -> None:
        self._runner, self._kept = runner, Kept(geometry, form)
        self._loaded: dict[str, Lora] = {}
        self._proved: set[tuple[tuple[str, int], ...]] = set()  # ranks for which rows were shown to be invariant
        self._changing = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which adapters are loaded, in order of their loading."""
        return tuple(self._loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded adapters' weights."""
        return sum(lora.packed.nbytes for lora in self._loaded.values())

    def load(self, name: str, path: str | Path) -> None:
        """Load an adapter from the folder that PEFT's `save_pretrained` made. Requests may name it afterwards; those
        under way are not held up.

        Its logits are compared with those of transformers, and its rows are shown to be invariant, as those of the
        model were. What is stored for it is found again after a restart, under any name. Raises ConfigError for a name
        that is taken or an adapter that does not fit, ModelNotFound for a folder without one, UnsupportedModel for a
        model that does not run on the compiled kernels.
        """
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
            raise ConfigError(f"an adapter's name must be a text of 1 to {_LONGEST} characters, got {name!r}")
        with self._changing:
            if name in self._loaded:
                raise ConfigError(f"an adapter {name!r} is loaded already: remove it first, or take another name")
            lora = self._checked(name, Path(path).expanduser())
            self._loaded = {**self._loaded, name: lora}
        log.info("adapter %s: %d MiB", name, lora.packed.nbytes >> 20)

    def remove(self, name: str) -> None:
        """Forget an adapter. Requests under way go on with it; its memory is freed when they have ended. What is stored
        for it stays, and leaves the store as other KV does. Raises ConfigError for an unknown name."""
        with self._changing:
            self.get(name)
            self._loaded = {each: lora for each, lora in self._loaded.items() if each != name}

    def get(self, name: str | None) -> Lora | None:
        """Return the adapter of a name; None for no name. Raises ConfigError for an unknown name."""
        if name is None:
            return None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            there = ", ".join(self._loaded) or "none"
            raise ConfigError(f"no adapter {name!r}: loaded are {there}; engine.adapters.load(name, path) loads one")
        return found

    def _checked(self, name: str, folder: Path) -> Lora:
        lean = self._lean(name)
        changes = read(folder)
        model = self._runner.model
        try:
            places = Places(model, described(model))
        except NotCovered as error:
            raise UnsupportedModel(f"adapter {name!r}: the kernels do not run the model now: {error}") from None
        _check_shapes(folder, changes, places.shapes)
        lora = Lora(name, _digest(changes), PackedLora(changes, places))
        with self._runner.lock:
            apart = lean.apart()
        changed = beside(model, changes)
        own = Runner(changed, None, port=self._runner.port)
        ours = Runner(changed, None, apart, self._runner.port)
        if reason := disagreement(ours, own, self._kept, lora):
            raise UnsupportedModel(f"adapter {name!r} ({folder}): the kernels do not agree with transformers: {reason}")
        self._prove(lora, changes, apart)
        return lora

    def _lean(self, name: str) -> Decoder:
        if (lean := self._runner.lean) is None or lean.name != "lean":
            raise UnsupportedModel(
                f"adapter {name!r}: adapters need the compiled kernels, and this model does not run on them (the log "
                "of level INFO says why): load the adapter's folder as the model, which runs through transformers"
            )
        if lean.adapted() is None:
            raise UnsupportedModel(f"adapter {name!r}: the kernels for adapters do not compile (the log says why)")
        return lean

    def _prove(self, lora: Lora, changes: Mapping[str, Low], lean: Decoder) -> None:
        """Show that rows are invariant, once for each set of ranks: it depends on nothing else of an adapter."""
        shape = tuple((module, len(low.a)) for module, low in changes.items())
        if shape in self._proved:
            return
        if reason := variance(lean, self._kept.geometry, self._runner.vocabulary, lora):
            raise UnsupportedModel(f"adapter {lora.name!r}: rows of the kernels are not invariant ({reason})")
        self._proved.add(shape)


def _check_shapes(folder: Path, changes: Mapping[str, Low], shapes: Mapping[str, tuple[int, int]]) -> None:
    for module, low in changes.items():
        if module not in shapes:
            named = sorted({each.rpartition(".")[2] for each in shapes})
            raise ConfigError(
                f"{folder} adapts {module!r}, which is no module of this model that can be adapted. Those are "
                f"{', '.join(named)} of its layers, not experts, embeddings or the head"
            )
        seen = len(low.b), low.a.shape[1]
        if seen != shapes[module]:
            raise ConfigError(
                f"{folder} adapts {module} of shape {list(seen)}, and this model's is {list(shapes[module])}: it was "
                "made for another model"
            )


def _digest(changes: Mapping[str, Low]) -> str:
    """Return a digest of what an adapter computes: float32 weights and scales, by module."""
    tensors = [(f"{name}.{half}", tensor) for name, low in changes.items() for half, tensor in _halves(low)]
    scales = {name: low.scale for name, low in changes.items()}
    return json_digest("keepwarm lora adapter 1", [tensors_digest(tensors), scales])


def _halves(low: Low) -> tuple[tuple[str, torch.Tensor], ...]:
    return ("a", low.a), ("b", low.b)
