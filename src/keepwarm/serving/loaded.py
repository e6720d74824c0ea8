"""A model in memory: its engine and its batch, how they come and how they go."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from keepwarm.core.snapshots import snapshot_id
from keepwarm.errors import ConfigError
from keepwarm.models.hub_gguf import downloaded_gguf
from keepwarm.models.places import gguf_file
from keepwarm.models.weight_files import weight_files
from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.settings import BatchSection, Served

if TYPE_CHECKING:  # they load torch
    from keepwarm.batching import Batcher
    from keepwarm.engine import Engine

_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin")  # the first kind that is there


@dataclass(frozen=True)
class Loaded:
    """One engine with its batch."""

    engine: Engine
    batcher: Batcher
    nbytes: int  # of its weights
    device: str  # where they lie: "cpu", "cuda", ...

    @classmethod
    def load(cls, served: Served, catalogue: Catalogue, batch: BatchSection, say: Callable[[str], None]) -> Loaded:
        """Load a model, and warm what is public. `say` is told what takes long. Raises what `from_pretrained` does."""
        say("loading torch")  # takes seconds by itself
        from keepwarm.batching import Batcher
        from keepwarm.engine import Engine

        say("loading the model")
        engine = Engine.from_pretrained(served.source, adapters=served.adapters, progress=say, **served.engine_settings)
        try:
            with suppress(ConfigError):  # where nothing can be constrained, requests for it are refused
                engine.pipeline.constraints.prepare()
            say("warming the catalogue")
            catalogue.warm(engine)
            say("loading registered sets")
            promote_sets(engine)
            batcher = Batcher(
                engine,
                max_batch=batch.max_batch,
                max_queue=batch.max_queue,
                max_prefill_tokens=batch.max_prefill_tokens,
            )
            return cls(engine, batcher, _bytes_of(engine), engine.pipeline.model.runner.device.type)
        except BaseException:
            engine.close()
            raise

    def close(self) -> None:
        """Cancel what still runs, write what is queued, and give up the model."""
        self.batcher.close(cancel=True)
        self.engine.close()


def promote_sets(engine: Engine) -> None:
    """Have the KV of registered sets read into RAM, as far as it is stored for this model: a name leads to what was
    stored last, perhaps for another one."""
    archive, own = engine.pipeline.archive, engine.pipeline.model.namespace().describe()["model"]
    leaves = [archive.contents.names().get(name) for name in engine.tool_sets.registry.all_names()]
    wanted = [name for leaf in leaves if leaf is not None for name in (leaf, snapshot_id(leaf))]
    found = archive.find(wanted).values()
    archive.promote(ref.run_id for ref in found if (archive.namespace_of(ref) or {}).get("model") == own)


def return_freed_memory() -> None:
    """Free what nothing refers to any more, and let the collector leave what stays alone.

    Otherwise every full collection walks over torch and the models, and holds the interpreter's lock for 0.2 s. What a
    model that was given up took goes back to the system, where the allocator can be told so.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def bytes_on_disk(source: str) -> int:
    """How many bytes a model's weights take as files; 0 if that is not known before it is loaded."""
    if (file := gguf_file(source) or downloaded_gguf(source)) is not None:
        return sum(part.stat().st_size for part in weight_files(file))
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return 0
    return next((size for kind in _WEIGHTS if (size := sum(file.stat().st_size for file in folder.glob(kind)))), 0)


def machine_memory(device: str) -> int:
    """Bytes of memory for models: of the device, or of this machine as far as a container may use it."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[1])
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # no limit, or no such file
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits)


def _bytes_of(engine: Engine) -> int:
    """Bytes of a model's weights, with the copies that kernels read and those of adapters. What a file holds and was
    copied is not counted: its pages were given back (`runtime.loader`)."""
    from keepwarm.runtime.native.narrow import narrow_tensors

    model, lean = engine.pipeline.model.model, engine.pipeline.model.runner.lean
    found = {} if lean is None else lean.storages
    blocks, narrow = lean is not None and lean.in_blocks, narrow_tensors(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not (blocks and str(tensor.dtype) == "torch.uint8") and name not in narrow:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values()) + engine.adapters.nbytes
