"""What a decoder knows of positions, float32, made by the model's own modules: cosines and sines of its rotary
embeddings, and factors of queries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from keepwarm.runtime.native.description import Factors, Table

_PIECE = 4096  # positions that are made together
_NEAR = 1e-5  # products of fewer bits are farther away; another number of threads is not

Pair = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, `[positions, pairs]`


class RotaryTables:
    """Tables that grow with the longest sequence. They are made piece by piece, so that a position's numbers do not
    depend on how many positions there are. The first piece is part of the arithmetic identity."""

    def __init__(
        self, makers: Sequence[Table], rotated: Sequence[int], device: torch.device, factors: Factors | None = None
    ) -> None:
        """`rotated` are the numbers of dims that the `makers` rotate."""
        self._makers, self._device, self._factors_of = makers, device, factors
        empty = [torch.empty(0, dims // 2, dtype=torch.float32, device=device) for dims in rotated]
        self.pairs: list[Pair] = [*zip(empty, empty, strict=True)]
        self.factors = None if factors is None else torch.empty(0, device=device)  # `[positions]`
        self.reached = 0
        self.grow(_PIECE)

    def grow(self, positions: int) -> bool:
        """Extend the tables to so many positions. Return whether they were extended; they lie elsewhere then.

        Raises RuntimeError if torch computes them otherwise than at first.
        """
        if positions <= self.reached:
            return False
        starts = range(self.reached, max(positions, 2 * self.reached), _PIECE)
        with torch.inference_mode():
            if self.reached:
                self._check()
            pairs = [self._longer(number, starts) for number in range(len(self._makers))]
            factors = self._more_factors(starts)
        if self._device.type == "cuda":  # steps of other streams read the old tables, and will read the new ones
            torch.cuda.synchronize(self._device)
        self.pairs, self.factors = pairs, factors  # all at once: memory may run out before
        self.reached += len(starts) * _PIECE
        return True

    @property
    def every(self) -> list[torch.Tensor]:
        """All tables."""
        return [*chain.from_iterable(self.pairs), *([] if self.factors is None else [self.factors])]

    def _more_factors(self, starts: range) -> torch.Tensor | None:
        if self._factors_of is None or self.factors is None:
            return None
        pieces = [self._factors_of(torch.arange(start, start + _PIECE)).to(self._device) for start in starts]
        return torch.cat([self.factors, *pieces])

    def _longer(self, number: int, starts: range) -> Pair:
        pieces = [self.pairs[number], *(self._piece(number, start) for start in starts)]
        cosine, sine = (torch.cat([piece[which] for piece in pieces]).contiguous() for which in (0, 1))
        return cosine, sine

    def _piece(self, number: int, start: int) -> Pair:
        cosine, sine = self._makers[number](torch.arange(start, start + _PIECE))
        return cosine.to(self._device), sine.to(self._device)

    def _check(self) -> None:
        """Raise RuntimeError if torch no longer computes what is there."""
        for number, pair in enumerate(self.pairs):
            again = self._piece(number, 0)
            if any((new - old[:_PIECE]).abs().max() > _NEAR for new, old in zip(again, pair, strict=True)):
                raise RuntimeError(
                    f"this prompt is longer than {self.reached} tokens, and torch computes positions with another "
                    "precision than when the model was loaded: set its precision of float32 products back, or make a "
                    "new engine"
                )
