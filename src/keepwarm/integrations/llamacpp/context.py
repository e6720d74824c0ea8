"""Reads and writes the state of a llama.cpp context, and checks that it has the form that this build writes."""

from __future__ import annotations

import ctypes
import logging
import struct
import weakref
from typing import Any

import llama_cpp
import numpy as np

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.ports import Bytes
from keepwarm.errors import UnsupportedModel
from keepwarm.integrations.llamacpp.form import Form, Reader, State, Unreadable, read_state
from keepwarm.integrations.llamacpp.memory import StateSink, StateSource

log = logging.getLogger(__name__)

_SEQUENCE = struct.pack("<Ii", 0xAF143CD8, 0)  # before the state of sequence 0
_PROBED = 4  # tokens
_EVERY = 1 << 16  # sections


class Context:
    """One `Llama`'s context. It holds one sequence, number 0, whose tokens the `Llama` knows.

    llama.cpp writes a state in two ways. The state of the whole context has every position. `Llama` hands over this
    one. The state of a sequence lacks the positions outside a window. It is restored without emptying all memory, and
    the next cells follow it.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        """Evaluates some tokens if the context is empty. Raises UnsupportedModel when it keeps no usable state."""
        self._ref = weakref.ref(llm)  # the Llama holds its cache, and so this
        # A cache with a window drops positions unless it is told to keep them (`swa_full`).
        self._windowed = llama_cpp.llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full
        self._most = 1 if self._windowed else _EVERY
        self.form = self._probe()

    @property
    def _llm(self) -> llama_cpp.Llama:
        llm = self._ref()
        if llm is None:
            raise ReferenceError("the Llama of this context is gone")
        return llm

    def _probe(self) -> Form:
        fresh = not self._llm.n_tokens
        if fresh:
            self._llm.eval([*range(_PROBED)])
        try:
            if not self._is_understood():
                log.warning("llama.cpp's states are kept whole: this build writes them in an unknown form")
                self._most = 0
            state = self.now()
            if not state.sections and not len(state.tail):
                raise UnsupportedModel("this context keeps no state of a sequence, so there is nothing to reuse")
            return Form(state.form.sections, state.form.has_tail or self._windowed)
        finally:
            if fresh:
                self.clear()

    def _is_understood(self) -> bool:
        """Return whether states that are put together from the parts of a read one equal it, byte for byte."""
        whole, one = self._whole(), self._sequence()
        try:
            states = {_head_of(whole): whole, _SEQUENCE: one}
            return all(self._is_same(head, data) for head, data in states.items())
        except Unreadable:
            return False

    def _is_same(self, head: bytes, data: Bytes) -> bool:
        tokens = self._llm.n_tokens
        state = read_state(data[len(head) :], tokens, self._most)
        if any(found.order is not None for found in state.sections):
            return True  # it was cut and shifted, so its cells have another order than in a new state
        source, sink = StateSource(state), StateSink(state.form, tokens, head, state.tail)
        for layer in range(len(source.geometry.layers)):
            for kv in (0, 1):
                sink.fill(layer, kv, 0, source.read(layer, kv, 0, tokens))
        return np.array_equal(sink.finish(), data)

    def handed_over(self, data: Bytes, tokens: TokenIds) -> State | None:
        """Read the whole context's state after `tokens`. None if it is not in the form of this context's states, or if
        the context has moved on and the state cannot be cut. Raises Unreadable."""
        if self.form.has_tail:
            held = token_ids(self._llm.input_ids[: self._llm.n_tokens])
            state = self.now() if np.array_equal(held, tokens) else None
        else:
            state = read_state(data[len(_head_of(data)) :], len(tokens), self._most)
        return state if state is not None and state.form == self.form else None

    def now(self) -> State:
        """Return the present state of the sequence. Raises Unreadable."""
        return read_state(self._sequence()[len(_SEQUENCE) :], self._llm.n_tokens, self._most)

    def sink(self, tokens: int, tail: Bytes) -> StateSink:
        """Return an empty state to fill, for `put`."""
        return StateSink(self.form, tokens, _SEQUENCE, tail)

    def put(self, data: Bytes, tokens: TokenIds) -> bool:
        """Replace the context's state by that of `tokens`. Return False, with an empty context, if it is refused."""
        if llama_cpp.llama_state_seq_set_data(self._llm.ctx, _pointer(data), len(data), 0) != len(data):
            self.clear()
            return False
        self._llm.input_ids[: len(tokens)] = tokens
        self._llm.n_tokens = len(tokens)
        if self._llm._logits_all:  # the logits of restored tokens are not known
            self._llm.scores[: len(tokens)] = np.nan
        self._llm._requires_eval = True  # the context's logits are not those of the last token
        return True

    def clear(self) -> None:
        """Empty the context."""
        self._llm._ctx.kv_cache_clear()
        self._llm.reset()

    def _whole(self) -> Bytes:
        return _read(llama_cpp.llama_state_get_size, llama_cpp.llama_state_get_data, self._llm.ctx)

    def _sequence(self) -> Bytes:
        return _read(llama_cpp.llama_state_seq_get_size, llama_cpp.llama_state_seq_get_data, self._llm.ctx, 0)


def _head_of(data: Bytes) -> bytes:
    """Return the bytes before a whole context's state, which name the architecture. Raises Unreadable."""
    reader = Reader(data)
    reader.take(*reader.numbers("I"))
    return data[: reader.at].tobytes()


def _read(size: Any, get: Any, context: Any, *which: int) -> Bytes:
    data = np.empty(size(context, *which), np.uint8)
    return data[: get(context, _pointer(data), len(data), *which)]


def _pointer(data: Bytes) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
