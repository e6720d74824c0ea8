"""Load a model, and find out before the first request which of its KV can be cached."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from keepwarm.config import EngineConfig, cache_dir
from keepwarm.core.codecs import codec
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import ModelIdentity, Namespace
from keepwarm.core.lora import Lora
from keepwarm.core.memory import give_back
from keepwarm.core.uncached import Why
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.runtime import attention
from keepwarm.runtime.adapters.registry import Adapters
from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.alone import Alone
from keepwarm.runtime.arena.form import CacheForm
from keepwarm.runtime.arena.state_bytes import KernelState, state_bytes
from keepwarm.runtime.arithmetic import Invariant, Scheduled, Surroundings, arithmetic_of
from keepwarm.runtime.checkpoint import without_hints
from keepwarm.runtime.decoders import again, is_for_kernels, lean_decoder, on_triton, seen_on_triton
from keepwarm.runtime.dispatch import devices
from keepwarm.runtime.filling import forget_files
from keepwarm.runtime.identity import buffers_of, model_identity, tokenizer_digest, weights_digest
from keepwarm.runtime.native.narrow import narrow_tensors
from keepwarm.runtime.native.proof import variance
from keepwarm.runtime.probe import Kept, checked, probe
from keepwarm.runtime.recommended import recommended
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.sources import from_source
from keepwarm.runtime.watch import WeightWatch

log = logging.getLogger(__name__)

ModelSource = str | Path | tuple[Any, Any]

_CHANGING_ROPE = ("dynamic", "longrope")
# transformers changes torch and its own classes for the whole process while it reads a model: two threads at once would
# leave that changed, and later models without their tied weights.
_ONE_AT_A_TIME = threading.Lock()


@dataclass
class LoadedModel:
    """A model ready to run, with what the engine must know about it."""

    runner: Runner
    tokenizer: Any  # transformers' tokenizer
    geometry: KVGeometry
    form: CacheForm
    identity: ModelIdentity
    context_window: int | None  # tokens; None when the configuration names none
    cacheable_window: int | None  # up to this length, KV does not depend on the whole sequence's length
    uncached_reason: Why  # why its KV is never cached; empty when it is cached
    stop_tokens: frozenset[int]
    watch: WeightWatch
    surroundings: Surroundings
    adapters: Adapters
    alone: Alone | None = None  # set for a model that may answer only one request at a time
    lock: threading.Lock = field(default_factory=threading.Lock)
    _arithmetic: Invariant | Scheduled | None = field(default=None, init=False, repr=False)  # as last seen
    _namespaces: dict[tuple[str, str], Namespace] = field(default_factory=dict, init=False, repr=False)  # for it

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    @property
    def recommended_sampling(self) -> dict[str, float]:
        """How the model's makers recommend to choose tokens, as arguments of a request."""
        return recommended(self.model.generation_config)

    @property
    def scratch_bytes(self) -> tuple[int, int]:
        """Approximate memory of a prefill step besides KV: bytes per row, and per row and attended position."""
        text: Any = self.model.config.get_text_config()
        hidden, heads = text.hidden_size, _largest(text, "num_attention_heads")
        inner = _largest(text, "intermediate_size") or 4 * hidden
        if self.runner.lean is not None:
            return 4 * (5 * hidden + 2 * inner), 0
        eager = self.runner.attention is None and self.model.config._attn_implementation == "eager"
        return self.model.dtype.itemsize * (8 * hidden + 3 * inner), 8 * heads if eager else 0

    @property
    def arithmetic(self) -> Invariant | Scheduled:
        """The arithmetic as it is set now."""
        return arithmetic_of(self.runner, self.surroundings)

    @property
    def attention(self) -> str:
        """The name of the attention kernel in use."""
        return self.arithmetic.identity.attention

    def namespace(self, template: str = "", lora: Lora | None = None) -> Namespace:
        """Return the root of this model's chains, with an adapter, for the arithmetic as it is set now. Hashes changed
        weights again."""
        with self.lock:
            if self.watch.changed():
                log.warning("the model's tensors or adapters changed in place: hashing them again")
                self._check_form()
                watch = WeightWatch(self.model)  # before tensors are read, so that the next call sees later changes
                if self.runner.lean is not None:
                    self.runner.lean = again(self.runner.lean, self.model, self.geometry)  # it has copies of weights
                    self._check_states()
                buffers = buffers_of(self.model)
                self.identity = model_identity(
                    self.model, weights_digest(self.model), buffers.model, self.identity.tokenizer, self.identity.codec
                )
                self.surroundings = Surroundings.of(self.model, devices(self.model), self.identity, buffers.arithmetic)
                self._namespaces.clear()
                self.watch = watch  # last, so that after a failure the next call tries again
            arithmetic = self.arithmetic
            if arithmetic != self._arithmetic:
                self._arithmetic = arithmetic
                self._namespaces.clear()
            identity = self.identity if lora is None else replace(self.identity, lora=lora.digest)
            if (key := (template, identity.lora)) not in self._namespaces:
                made = arithmetic if lora is None else self._with_adapters(arithmetic)
                self._namespaces[key] = Namespace(identity, made.identity, template)
            return self._namespaces[key]

    def is_current(self, namespace: Namespace) -> bool:
        """Whether the model and its arithmetic are still those for which `namespace` was given out. Looks for changes
        now, but hashes nothing."""
        with self.lock:
            key = namespace.template, namespace.model.lora
            given = self._namespaces.get(key)  # after any change it is a new object
            return given is namespace and not self.watch.changed() and self.arithmetic == self._arithmetic

    def _with_adapters(self, arithmetic: Invariant | Scheduled) -> Invariant:
        """Return the arithmetic of rows with an adapter. Raises UnsupportedModel when the kernels do not run them."""
        lean = self.runner.lean
        adapted = None if lean is None else lean.adapted()
        if not isinstance(arithmetic, Invariant) or adapted is None:
            raise UnsupportedModel("adapters need the compiled kernels, and the model stopped to run on them")
        return arithmetic._replace(kernels=adapted.digest)

    def _check_states(self) -> None:
        """Raise UnsupportedModel when arenas hold states that nothing moves any more."""
        lean = self.runner.lean
        if self.form.kernel_states and (lean is None or lean.states != self.form.kernel_states):
            raise UnsupportedModel(
                "the compiled kernels, which keep the model's recurrent state, do not run the changed model: make a "
                "new engine of it"
            )

    def _check_form(self) -> None:
        """Raise UnsupportedModel when the model's KV no longer has the form known here: it has another dtype, say."""
        kept = probe(Runner(self.model, None, port=self.runner.port))
        if (kept.geometry, kept.form.each) != (self.geometry, self.form.each) and not self.uncached_reason:
            raise UnsupportedModel(
                f"the model's KV has another form than when it was loaded ({kept.geometry.describe()} instead of "
                f"{self.geometry.describe()}): make a new engine of it"
            )


def load(source: ModelSource, config: EngineConfig, progress: Callable[[str], None] = log.warning) -> LoadedModel:
    """Load a model from a folder, a GGUF file, a hub id or "demo", or take a loaded `(model, tokenizer)` pair. Another
    thread that loads a model waits.

    Raises ModelNotFound, UnsupportedModel, DownloadError, ConfigError.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        progress("waiting for another model that this process loads")
        _ONE_AT_A_TIME.acquire()
    try:
        folder: Path | None = None
        if isinstance(source, tuple):
            model, tokenizer = source
            if config.device is not None or config.dtype is not None:
                raise ConfigError("device and dtype are those of the model that was passed; leave them out")
        else:
            model, tokenizer, folder = from_source(source, config, progress, narrow=config.attention == "auto")
        with without_hints():
            loaded = _prepared(model, tokenizer, folder, config)
            if isinstance(source, tuple) or loaded.runner.lean is not None or not narrow_tensors(model):
                return loaded
            del loaded, model  # modules that widen their weights at each step are slow
            return _prepared(*from_source(source, config, progress, narrow=False), config)
    finally:
        _ONE_AT_A_TIME.release()


def _prepared(model: PreTrainedModel, tokenizer: Any, folder: Path | None, config: EngineConfig) -> LoadedModel:
    model.eval()
    _refuse_what_is_no_decoder(model)
    watch = WeightWatch(model)  # before anything is read, so that changes meanwhile are noticed
    own, known = Runner(model, None), cache_dir() / "identity.json"
    own.port.synchronize()  # weights are in place for every reader
    weights, buffers = weights_digest(model, folder, known), buffers_of(model)
    kept = checked(own, probe(own), weights, known)
    runner = _choose_runner(own, kept, config)
    forget_files(model)
    runner.port.synchronize()  # all work so far is done, for requests on any stream
    identity = model_identity(
        model, weights, buffers.model, tokenizer_digest(tokenizer, known), codec(config.kv_codec).identity
    )
    text = model.config.get_text_config()
    give_back()
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        geometry=kept.geometry,
        form=_form(kept, runner),
        identity=identity,
        context_window=_context_window(text),
        cacheable_window=_cacheable_window(text),
        uncached_reason=kept.uncached_reason,
        stop_tokens=_stop_tokens(model, tokenizer),
        watch=watch,
        surroundings=Surroundings.of(model, devices(model), identity, buffers.arithmetic),
        adapters=Adapters(runner, kept.geometry, kept.form),
        alone=Alone.of(model) if kept.alone else None,
    )


def _refuse_what_is_no_decoder(model: Any) -> None:
    name = type(model).__name__
    if not hasattr(model, "config") or not callable(getattr(model, "forward", None)):
        raise UnsupportedModel(f"expected a transformers model, got {name}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; Keepwarm runs decoder-only models")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModel("prompt-learning adapters put KV of their own before the prompt; use LoRA or merge it")


def _choose_runner(own: Runner, kept: Kept, config: EngineConfig) -> Runner:
    """Choose kernels of ours if they agree with the model, else the prefix + step kernel if it does, else the model's
    own attention."""
    model, geometry = own.model, kept.geometry
    if kept.serial and config.attention != "triton":
        return Runner(model, None, port=own.port, serial=True)
    wide = any(layer.key_dim != layer.value_dim for layer in geometry.layers)
    none = kept.uncached_reason or wide or not geometry.layers
    if config.attention == "triton":
        return on_triton(own, kept, (kept.uncached_reason or "no KV that our kernels can keep") if none else "")
    if none or config.attention == "model":
        return own
    if (found := seen_on_triton(own, kept)) is not None:
        return found
    ours, why = own, ""
    if attention.may_support(model, own.device):
        ours = Runner(model, attention.NAME, port=own.port)
        if why := disagreement(ours, own, kept):
            ours = own
    lean = _on_kernels(own, ours, kept)
    if lean is ours and why:
        log.info("using the model's own attention: %s", why)
    return lean


def _on_kernels(own: Runner, ours: Runner, kept: Kept) -> Runner:
    """Return a runner with the compiled kernels, if they agree with the model; else `ours`."""
    model, geometry = own.model, kept.geometry
    if not own.port.is_host or not is_for_kernels(kept.form):
        return ours
    lean = Runner(model, ours.attention, lean_decoder(model, geometry), own.port)
    if lean.lean is None:
        return ours
    if reason := disagreement(lean, own, kept):
        log.warning("every step runs through transformers: the lean decoder is wrong for this model (%s)", reason)
        return ours
    if reason := variance(lean.lean, geometry, lean.vocabulary, form=kept.form):
        log.warning("every step runs through transformers: rows of the lean decoder are not invariant (%s)", reason)
        return ours
    return lean


def _form(kept: Kept, runner: Runner) -> CacheForm:
    """Return what arenas keep of each layer. The compiled kernels keep states in a form of their own."""
    if runner.lean is None or not runner.lean.states:
        return kept.form
    sample = [*map(KernelState, runner.lean.states)]
    return replace(kept.form, kernel_states=runner.lean.states, state_bytes=state_bytes(sample))


def _context_window(text: Any) -> int | None:
    """Return the context window; None if there is no limit, which XLNet's configuration writes as -1."""
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return found if found and found > 0 else None


def _largest(text: Any, name: str) -> int:
    """Return the largest value of a size; 0 without one. Some configurations list it by layer (Gemma 3n), or have it
    only in each layer's own configuration (dots 3)."""
    try:
        found = getattr(text, name, None)
    except RuntimeError:  # it differs between layers
        found = [getattr(layer, name, None) or 0 for layer in text.per_layer_config]
    return int(max(found, default=0) if isinstance(found, list | tuple) else found or 0)


def _cacheable_window(text: Any) -> int | None:
    """Return the length up to which keys are rotated alike, for RoPE that changes with the sequence's length."""
    settings = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [v for v in settings.values() if isinstance(v, dict)] or [settings]
    for rope in nested:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in _CHANGING_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return int(original or text.max_position_embeddings)
    return None


def _stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id if model.generation_config else None, tokenizer.eos_token_id):
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return frozenset(ids)
