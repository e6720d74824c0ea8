"""A context of llama.cpp: its state is read, written, and shown to be in the form that this build writes."""

from __future__ import annotations

import ctypes
import logging
import struct
from typing import Any

import llama_cpp
import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import Bytes
from keepwarm.errors import UnsupportedModel
from keepwarm.integrations.llamacpp.form import Form, State, Unreadable, read_state
from keepwarm.integrations.llamacpp.memory import StateSink, StateSource

log = logging.getLogger(__name__)

_MAGIC = 0xAF143CD8  # of one sequence's state
_PROBED = 4  # tokens
_EVERY = 1 << 16  # sections


class Context:
    """One `Llama`'s context. It holds one sequence, number 0, whose tokens the `Llama` knows."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        """Evaluates some tokens if the context is empty. Raises UnsupportedModel when it keeps no usable state."""
        self._llm = llm
        # A cache with a window gives positions away unless it is told to keep them (`swa_full`).
        windowed = llama_cpp.llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full
        self._most = 1 if windowed else _EVERY
        self.architecture, self.form = self._probe(windowed)

    def _probe(self, windowed: bool) -> tuple[bytes, Form]:
        fresh = not self._llm.n_tokens
        if fresh:
            self._llm.eval([*range(_PROBED)])
        try:
            tokens = self._llm.n_tokens
            data = self._state()
            try:
                state = self.read(data, tokens)
            except (Unreadable, struct.error) as error:
                raise UnsupportedModel(f"llama.cpp wrote a state that cannot be read: {error}") from None
            if not self._is_understood(data, state, tokens):
                log.warning("llama.cpp's states are kept whole: this build writes them in an unknown form")
                self._most = 0
                state = self.read(data, tokens)
            if not state.sections and not len(state.tail):
                raise UnsupportedModel("this context keeps no state of a sequence, so there is nothing to reuse")
            return state.architecture, Form(state.form.sections, state.form.has_tail or windowed)
        finally:
            if fresh:
                self.clear()

    def _is_understood(self, data: Bytes, state: State, tokens: int) -> bool:
        """Whether the state that is put together from what was read is the same, byte for byte."""
        if any(found.order is not None for found in state.sections):
            return True  # it was cut and shifted; its cells are in another order than they will be
        whole = self._copied(state, _head(state.architecture), tokens, state.tail)
        if not np.array_equal(whole, data):
            return False
        if len(state.tail) or self._most != _EVERY:
            return True
        one = self._copied(state, _SEQUENCE, tokens, state.tail)
        return np.array_equal(one, self._sequence_state())

    def _copied(self, state: State, head: bytes, tokens: int, tail: Bytes) -> Bytes:
        source, sink = StateSource(state), StateSink(state.form, tokens, head, tail)
        for layer in range(len(source.geometry.layers)):
            for kv in (0, 1):
                sink.fill(layer, kv, 0, source.read(layer, kv, 0, tokens))
        return sink.finish()

    def read(self, data: Bytes, tokens: int) -> State:
        """Read a whole context's state. Raises Unreadable."""
        return read_state(data, tokens, self._most)

    def state(self) -> State:
        """Return the context's present state. Raises Unreadable."""
        return self.read(self._state(), self._llm.n_tokens)

    def sink(self, tokens: int, tail: Bytes) -> StateSink:
        """Return a state to be put together, for `put`."""
        return StateSink(self.form, tokens, _head(self.architecture) if self.form.has_tail else _SEQUENCE, tail)

    def put(self, data: Bytes, tokens: TokenIds) -> bool:
        """Replace the context's state by that of `tokens`. Return False, with an empty context, if it is refused."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if self.form.has_tail:
            taken = llama_cpp.llama_state_set_data(self._llm.ctx, pointer, len(data))
        else:
            taken = llama_cpp.llama_state_seq_set_data(self._llm.ctx, pointer, len(data), 0)
        if taken != len(data):
            self.clear()
            return False
        self._llm.input_ids[: len(tokens)] = tokens
        self._llm.n_tokens = len(tokens)
        self._llm._requires_eval = True  # its logits are not those of the last token
        return True

    def clear(self) -> None:
        """Empty the context."""
        self._llm._ctx.kv_cache_clear()
        self._llm.reset()

    def _state(self) -> Bytes:
        return _read(llama_cpp.llama_state_get_size, llama_cpp.llama_state_get_data, self._llm.ctx)

    def _sequence_state(self) -> Bytes:
        return _read(llama_cpp.llama_state_seq_get_size, llama_cpp.llama_state_seq_get_data, self._llm.ctx, 0)


_SEQUENCE = struct.pack("<Ii", _MAGIC, 0)


def _head(architecture: bytes) -> bytes:
    return struct.pack("<I", len(architecture)) + architecture


def _read(size: Any, get: Any, context: Any, *which: int) -> Bytes:
    data = np.empty(size(context, *which), np.uint8)
    count = get(context, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(data), *which)
    return data[:count]
