"""Runs the model: one prefill step, or one decoded token, at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from keepwarm.core.blocks import TokenIds
from keepwarm.core.schedule import next_part
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena, ArenaCache
from keepwarm.runtime.arena.state_bytes import OwnCache
from keepwarm.runtime.attention import switched
from keepwarm.runtime.device import DevicePort, port_to
from keepwarm.runtime.dispatch import CUDNN, device_of, devices, without_autocast
from keepwarm.runtime.lock import TurnLock
from keepwarm.runtime.native.places import Sequenced
from keepwarm.runtime.stepping import Decoder

ROWS = "keepwarm_rows"  # attention of `runtime.blend.scatter`
CACHE_NAMES = ("past_key_values", "cache_params", "cache")  # arguments for transformers' cache; since 5.24 the last


def embeddings(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embeddings `[vocab, hidden]`. Their device takes prompts; `vocab` is the number of token ids."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def cache_name(function: Callable[..., Any]) -> str:
    """Return a function's name for the argument that takes transformers' cache; the library's own if it names none."""
    usual = GenerationMixin.prepare_inputs_for_generation
    names = [name for each in (function, usual) for name in inspect.signature(each).parameters]
    return next(name for name in names if name in CACHE_NAMES)


def _body(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model without its language-model head; the model itself if that part cannot be found."""
    for body in (model.get_decoder(), model.base_model):
        if isinstance(body, torch.nn.Module) and "input_ids" in inspect.signature(body.forward).parameters:
            return body
    return model


def _parts(
    tokens: TokenIds, start: int, wanted: list[int], most: int | None
) -> Iterator[tuple[TokenIds, int, list[int]]]:
    """Yield parts of at most `most` rows of a step, with their positions and wanted rows. The last part has all the
    wanted rows, however long it is."""
    while most is not None and (rows := next_part(len(tokens), most)) < len(tokens):
        if min(wanted, default=rows) < rows:
            break
        yield tokens[:rows], start, []
        tokens, start, wanted = tokens[rows:], start + rows, [row - rows for row in wanted]
    yield tokens, start, wanted


def _last(tokens: Sequence[TokenIds]) -> list[int]:
    """Return each sequence's last row."""
    return [end - 1 for end in accumulate(map(len, tokens))]


def _all(tokens: Sequence[TokenIds]) -> list[int]:
    """Return every row."""
    return list(range(sum(map(len, tokens))))


def _passes(sequences: Sequence[Sequenced]) -> tuple[list[int], list[int]]:
    """Return which sequences have no adapter, and which have one, adapter by adapter."""
    loras = [sequence.lora for sequence in sequences]
    first = {lora: i for i, lora in reversed([*enumerate(loras)])}
    adapted = [i for i, lora in enumerate(loras) if lora is not None]
    plain = [i for i, lora in enumerate(loras) if lora is None]
    return plain, sorted(adapted, key=lambda i: first[loras[i]])


class Runner:
    """Forward passes of one model. Safe to share among threads: one step runs at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str | None,
        lean: Decoder | None = None,
        port: DevicePort | None = None,
        *,
        serial: bool = False,
    ) -> None:
        """`port` is a port to the model's device; None makes one. `serial`: after the first step run token by token,
        for a model whose recurrent layers take several tokens only at the beginning. Raises UnsupportedModel for a
        device without a port."""
        self.model = model
        self.attention = attention  # a name in transformers' interface; None: the model's own
        self.lean = lean  # None: steps run through transformers
        self.serial = serial
        self.device = device_of(model.get_input_embeddings(), embeddings(model))
        self.port = port_to(self.device) if port is None else port
        self._kinds = {self.device.type, *(device.type for device in devices(model).values())}
        self.vocabulary = embeddings(model).shape[0]
        wrapper: Any = model
        inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward takes anything
        parameters = inspect.signature(inner.forward).parameters
        self.cache_name = cache_name(inner.forward)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._positions = "position_ids" in parameters or takes_any
        self._keep = "logits_to_keep" in parameters
        self._body = _body(model)
        # One lock per model object: engines that share the model share its attention setting.
        self.lock: TurnLock = model.__dict__.setdefault("_keepwarm_lock", TurnLock())
        # Threads that are not preferred release the lock after this many rows; None: after a step.
        self.piece: int | None = None

    @property
    def is_invariant(self) -> bool:
        """Whether a row's bits depend only on the tokens at and before it: which of the two kinds of arithmetic this
        is. `core.schedule` has the consequences."""
        return self.lean is not None

    @contextmanager
    def _running(self, attention: str | None) -> Iterator[None]:
        """Run one step at a time, in the model's own precision whatever the caller's autocast setting, and without
        cuDNN's attention."""
        with (
            self.lock,
            self.port.memory_for("a step"),
            torch.inference_mode(),
            without_autocast(self._kinds),
            self.without_cudnn(),
            switched(self.model, None if self.model.training else attention),  # dropout is the model's own
        ):
            yield

    def without_cudnn(self) -> AbstractContextManager[None]:
        """Leave cuDNN's attention out while the `with` block runs; see `dispatch.Cudnn`."""
        return CUDNN.unused() if "cuda" in self._kinds else nullcontext()

    def step(
        self, tokens: TokenIds, cache: Cache, start: int, there: torch.Tensor | None = None, *, largest: bool = False
    ) -> torch.Tensor:
        """Run `tokens` at positions `start ...`, with all KV before them in `cache`. Append their KV to it. `there` is
        the same tokens on the model's device, if they are there; `tokens` then only tells how many there are. With
        `largest`, only the largest logit is asked for: the decoder may set others to minus infinity.

        Return the logits after the last token, `[vocab]`, in the model's dtype or, with the same values, in float32.
        """
        if (lean := self._lean_for(cache)) is not None:
            return self._run_lean(lean, tokens, cache, start, [len(tokens) - 1], there, largest)[0]
        if self._is_split(tokens, start):
            self.extend(tokens[:-1], cache, start)
            tokens, start = tokens[-1:], start + len(tokens) - 1
            there = None if there is None else there[-1:]
        more = {"logits_to_keep": 1} if self._keep else {}
        logits: torch.Tensor = self._through(self.model, tokens, cache, start, more, there).logits
        return logits[0, -1].to(self.device)

    def step_each(self, tokens: TokenIds, cache: Cache, start: int, *, largest: bool = False) -> torch.Tensor:
        """Do what `step` does, but return the logits after every token, `[len(tokens), vocab]`."""
        if (lean := self._lean_for(cache)) is not None:
            return self._run_lean(lean, tokens, cache, start, list(range(len(tokens))), None, largest)
        if self._is_split(tokens, start):
            return torch.stack([self.step(tokens[at : at + 1], cache, start + at) for at in range(len(tokens))])
        logits: torch.Tensor = self._through(self.model, tokens, cache, start).logits
        return logits[0].to(self.device)

    def extend(self, tokens: TokenIds, cache: Cache, start: int) -> None:
        """Do what `step` does, without logits: the language-model head is not run."""
        if (lean := self._lean_for(cache)) is not None:
            self._run_lean(lean, tokens, cache, start, [])
            return
        size = 1 if self._is_split(tokens, start) else len(tokens)
        for at in range(0, len(tokens), size):
            self._through(self._body, tokens[at : at + size], cache, start + at)

    def _is_split(self, tokens: TokenIds, start: int) -> bool:
        return self.serial and start > 0 and len(tokens) > 1

    def _through(
        self,
        run: torch.nn.Module,
        tokens: TokenIds,
        cache: Cache,
        start: int,
        more: Mapping[str, Any] | None = None,
        there: torch.Tensor | None = None,
    ) -> Any:
        """Run a step through transformers. Raises RuntimeError when it would not continue the cache's content."""
        arena = cache.arena if isinstance(cache, ArenaCache) else None
        if arena is not None:
            if arena.states and arena.states.of_kernels:
                raise UnsupportedModel(
                    "the model stopped to run on the compiled kernels, which keep its recurrent state: make a new "
                    "engine of it"
                )
            if arena.lora is not None:
                raise UnsupportedModel(
                    f"adapter {arena.lora.name!r} needs the compiled kernels, and the model stopped to run on them"
                )
            arena.check(start)
        own = cache.own if isinstance(cache, ArenaCache) else None
        try:
            with self._running(self.attention):
                ids = self.port.upload(tokens.astype("int64")) if there is None else there
                found = run(**self._arguments(ids[None], cache if own is None else own, start), **(more or {}))
        except BaseException:
            if arena is not None:  # some layers hold the step's KV already
                arena.seek(min(start, arena.length))
            raise
        if own is not None:
            own.value = getattr(found, own.name)
        if arena is not None:
            arena.computed(start + len(tokens))
        return found

    def step_together(
        self,
        tokens: Sequence[TokenIds],
        starts: Sequence[int],
        sequences: Sequence[Sequenced],
        there: torch.Tensor | None = None,
        *,
        each: bool = False,
        largest: bool = False,
    ) -> torch.Tensor:
        """Run the next tokens of several sequences, whose KV is in place, in one pass of the lean decoder. Return the
        logits after each sequence's last token, `[len(tokens), vocab]`; with `each`, after all tokens in order.

        Each row equals what `step` computes for those tokens alone. Sequences with an adapter run in a pass of their
        own, those of one adapter side by side. `there`, `largest`: see `step`. With `there` no sequence has an adapter.
        """
        lean = self.lean
        if lean is None or self.model.training:
            raise RuntimeError("the model stopped running on the lean decoder while requests were under way")
        with self.lock, self._room(), torch.inference_mode():
            wanted = _all if each else _last
            if all(sequence.lora is None for sequence in sequences):
                return lean.step(tokens, starts, sequences, wanted(tokens), there=there, largest=largest)
            found: dict[int, torch.Tensor] = {}
            for which in filter(None, _passes(sequences)):
                some, places = [tokens[i] for i in which], [sequences[i] for i in which]
                logits = lean.step(some, [starts[i] for i in which], places, wanted(some), largest=largest)
                found |= zip(which, logits.split([len(part) if each else 1 for part in some]), strict=True)
            return torch.cat([found[i] for i in range(len(tokens))])

    def _room(self) -> AbstractContextManager[None]:
        """Say what is to be done if a device has no memory for a step."""
        return nullcontext() if self.port.is_host else self.port.memory_for("a step")

    def _lean_for(self, cache: Cache) -> Decoder | None:
        return self.lean if isinstance(cache, ArenaCache) and not self.model.training else None

    def _run_lean(
        self,
        lean: Decoder,
        tokens: TokenIds,
        cache: Cache,
        start: int,
        wanted: list[int],
        there: torch.Tensor | None = None,
        largest: bool = False,
    ) -> torch.Tensor:
        assert isinstance(cache, ArenaCache)
        most = None if there is not None or self.lock.is_preferred else self.piece
        for part in _parts(tokens, start, wanted, most):
            logits = self._lean_step(lean, cache.arena, *part, there, largest)
        return logits

    def _lean_step(
        self,
        lean: Decoder,
        arena: Arena,
        tokens: TokenIds,
        start: int,
        wanted: list[int],
        there: torch.Tensor | None,
        largest: bool,
    ) -> torch.Tensor:
        """Run a step, in parts if it is long. While KV is arriving it is whole: all of it overlaps with that."""
        with self.lock, self._room(), torch.inference_mode():
            most = None if there is not None or arena.arrivals else lean.rows_at_once
            for part in _parts(tokens, start, wanted, most):
                logits = self._append(lean, arena, *part, there, largest)
        return logits

    def _append(
        self,
        lean: Decoder,
        arena: Arena,
        tokens: TokenIds,
        start: int,
        wanted: list[int],
        there: torch.Tensor | None,
        largest: bool,
    ) -> torch.Tensor:
        arena.check(start)
        end = start + len(tokens)
        sequence = arena.sequenced(end)  # may wait for what is still arriving
        largest = largest and bool(wanted)
        try:
            logits = lean.step([tokens], [start], [sequence], wanted, arena.arriving, there, largest=largest)
        except BaseException:
            arena.states.lose()
            raise
        arena.advance(end)
        return logits

    def run_rows(
        self,
        tokens: TokenIds,
        positions: torch.Tensor,
        cache: Cache,
        mask: torch.Tensor,
        logits: bool,
        extra: dict[str, Any],
    ) -> torch.Tensor | None:
        """Run rows at any `positions` through transformers, with an additive mask `[1, 1, rows, positions]`."""
        ids = self.port.upload(tokens.astype("int64"))[None]
        arguments = {
            "input_ids": ids,
            "position_ids": positions[None],
            "attention_mask": mask,
            self.cache_name: cache,
            "use_cache": True,
            **extra,
        }
        backend = bool(getattr(self.model, "_supports_attention_backend", False))
        with self._running(ROWS if backend else None):
            if not logits:
                self._body(**arguments)
                return None
            if self._keep:
                arguments["logits_to_keep"] = 1
            out: torch.Tensor = self.model(**arguments).logits
        return out[0, -1]

    def _arguments(self, ids: torch.Tensor, cache: Cache | OwnCache, start: int) -> dict[str, Any]:
        given = {cache.name: cache.value} if isinstance(cache, OwnCache) else {self.cache_name: cache}
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, **given}
        if self._positions:
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        return arguments
