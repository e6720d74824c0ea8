"""Applies the changes from recomputing some tokens of a chunk to the tokens near them.

A new context changes the keys (before rotation) and values of neighbouring tokens in a similar way. So the change of a
token that is not recomputed is estimated from those that are, by Gaussian process regression over positions (Rasmussen
and Williams, Gaussian Processes for Machine Learning, 2006, equation 2.25), the same for all layers and dimensions. It
takes no forward pass. Arithmetic is float32, whatever the KV's dtype.

The part that near tokens share decays exponentially with distance (an Ornstein-Uhlenbeck process). This has the Markov
property: between two recomputed tokens it depends only on these two. So changes are smoothed where they are known, and
interpolated for the other tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.rope import Rotary
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.blend.rope import turned
from keepwarm.runtime.blend.scatter import Positions
from keepwarm.runtime.native.build import CHUNKS, LANES, compiled, done

# Covariance of two changes: the part common to a chunk, and the part that near tokens share. Only ratios matter.
_COMMON, _NEAR, _REACH, _NOISE = 0.2, 0.3, 24.0, 0.3  # the reach in tokens
_WINDOW = 256  # tokens that are estimated together, at most: several times the reach
_ALIKE = 32  # windows of one computation differ by at most this many recomputed tokens
_WINDOWS = np.dtype([(name, "<i8") for name in ("known", "known_end", "rest", "rest_end", "smooth")])
_NEIGHBOURS = np.dtype([("known", "<i4", 2), ("share", "<f4", 2)])


class _Carry(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("planes", "before", "known", "rest", "windows", "smooth", "near", "cosine", "sine")
        ),
        ("first", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "heads", "dim", "pairs", "changed", "windowed", "itemsize")),
    )


@dataclass(frozen=True)
class Window:
    """Tokens of one chunk: which are recomputed, and which part of their changes each of the others takes over."""

    known: Positions
    rest: Positions
    smooth: npt.NDArray[np.float32]  # [1 + known, known]: from the changes to the common part and each one's own part
    near: npt.NDArray[Any]  # for each of `rest`: the numbers of two of `known`, and its shares of their own parts


class Changes:
    """The changes from recomputing tokens. Make it before they are recomputed, for it copies their KV; call `carry`
    afterwards."""

    def __init__(
        self,
        arena: Arena,
        chosen: Positions,
        chunks: Sequence[tuple[int, int]],
        rotaries: Sequence[Rotary | None],
        *,
        native: bool = True,
    ) -> None:
        """`chosen` positions, rising and at least one, are recomputed; `chunks` are spans of relocated positions,
        `rotaries` those of the layers."""
        self._arena = arena
        self._rotaries = rotaries
        self._native = native
        self._planes = [layer.plane(kv) for layer in arena.layers for kv in (0, 1)]
        self.windows = _windows(chosen, chunks)
        self._where = torch.from_numpy(chosen).to(arena.device)
        self._known = chosen
        self._before = self._taken()

    def _taken(self) -> list[torch.Tensor]:
        """Copy the chosen tokens' KV, `[heads, chosen, dim]` per plane; contiguous if all planes have one shape."""
        first = self._planes[0]
        if any(plane.shape != first.shape for plane in self._planes):
            return [plane.tensor().index_select(1, self._where) for plane in self._planes]
        shape = len(self._planes), first.shape[0], len(self._known), first.shape[2]
        taken = list(torch.empty(shape, dtype=first.dtype, device=self._arena.device))
        for plane, into in zip(self._planes, taken, strict=True):
            torch.index_select(plane.tensor(), 1, self._where, out=into)
        return taken

    def divergence(self, layers: int) -> float:
        """Return the root mean square, over `layers` evenly spaced layers, of the values' relative change."""
        apart = -(-len(self._arena.layers) // layers)
        shares = []
        for layer in range(apart - 1, len(self._arena.layers), apart):
            new = self._planes[2 * layer + 1].tensor().index_select(1, self._where).float()
            old = self._before[2 * layer + 1].float()
            shares.append(((old - new).square().sum() / new.square().sum().clamp_min(1e-20)).item())
        return float(np.sqrt(np.mean(shares)))

    def carry(self) -> None:
        """Apply the estimated changes to the tokens that were not recomputed."""
        if self.windows and not (self._native and self._carried()):
            self._carry()

    def _carry(self) -> None:
        positions = torch.arange(self._planes[0].shape[1], device=self._arena.device)
        tables: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        for window in self.windows:
            begin = int(np.searchsorted(self._known, window.known[0]))
            known, rest, smooth, near, share = (
                torch.from_numpy(each).to(positions.device)
                for each in (window.known, window.rest, window.smooth, window.near["known"], window.near["share"])
            )
            for at, plane in enumerate(self._planes):
                rotary = self._rotaries[at // 2] if at % 2 == 0 else None
                old = self._before[at][:, begin : begin + len(known)].float()
                now = plane.tensor()
                delta = now.index_select(1, known).float() - old
                if rotary is not None and rotary not in tables:
                    tables[rotary] = _angles(rotary, positions)
                if rotary is not None:
                    cosine, sine = tables[rotary]
                    delta = turned(delta, torch.empty_like(delta), rotary, cosine[known], -sine[known])
                common, added = (smooth @ delta).split([1, len(known)], dim=1)
                change = common + sum(share[:, i, None] * added[:, near[:, i]] for i in (0, 1))
                if rotary is not None:
                    change = turned(change, torch.empty_like(change), rotary, cosine[rest], sine[rest])
                plane.scatter(rest, (now.index_select(1, rest).float() + change).to(plane.dtype))

    def _carried(self) -> bool:
        """Do what `_carry` does with the compiled kernel. Return False if it does not support the planes."""
        rotary, plane = self._rotaries[0], self._planes[0]
        if (
            plane.array is None
            or plane.dtype not in (torch.bfloat16, torch.float32)
            or any(each != rotary for each in self._rotaries)
            or (rotary is not None and rotary.interleaved)
            or any(each.shape != plane.shape for each in self._planes)
            or plane.shape[2] % LANES
        ):
            return False
        kernels = compiled(CHUNKS)
        if kernels is None:
            return False
        windows, rest, smooth = np.empty(len(self.windows), _WINDOWS), 0, 0
        for at, each in enumerate(self.windows):
            known = int(np.searchsorted(self._known, each.known[0]))
            windows[at] = known, known + len(each.known), rest, rest + len(each.rest), smooth
            rest, smooth = rest + len(each.rest), smooth + each.smooth.size
        places = np.concatenate([each.rest for each in self.windows])
        near = np.concatenate([each.near for each in self.windows])
        flat = np.concatenate([each.smooth.reshape(-1) for each in self.windows])
        first = int(min(self._known[0], places[0]))
        cosine = sine = np.empty((0, 0), np.float32)
        if rotary is not None:
            positions = torch.arange(first, int(max(self._known[-1], places[-1])) + 1)
            cosine, sine = (table.numpy() for table in _angles(rotary, positions))
        addresses = np.array([each.address for each in self._planes])
        carry = _Carry(
            addresses.ctypes.data,
            self._before[0].data_ptr(),
            self._known.ctypes.data,
            places.ctypes.data,
            windows.ctypes.data,
            flat.ctypes.data,
            near.ctypes.data,
            cosine.ctypes.data if rotary is not None else None,
            sine.ctypes.data if rotary is not None else None,
            first,
            plane.head_stride,
            len(self._planes),
            plane.shape[0],
            plane.shape[2],
            cosine.shape[1],
            len(self._known),
            len(windows),
            plane.dtype.itemsize,
        )
        done(kernels.library.keepwarm_carry(ctypes.byref(carry), torch.get_num_threads()))
        return True


def _angles(rotary: Rotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `[positions, pairs]`, float32."""
    angles = positions.double()[:, None] * torch.tensor(
        rotary.frequencies, dtype=torch.float64, device=positions.device
    )
    return angles.cos().float(), angles.sin().float()


def _windows(chosen: Positions, chunks: Sequence[tuple[int, int]]) -> list[Window]:
    """Return the windows that have tokens of both kinds."""
    found = []
    for start, end in chunks:
        count = -(-(end - start) // _WINDOW)
        borders = np.linspace(start, end, count + 1).astype(np.int64)
        for first, last in pairwise(borders):
            known = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, last)]
            if 0 < len(known) < last - first:
                others = np.ones(last - first, dtype=bool)
                others[known - first] = False
                found.append((known, first + np.flatnonzero(others)))
    smooth: dict[int, npt.NDArray[np.float32]] = {}
    sizes = np.array([len(known) for known, _ in found])
    for size in np.unique(-(-sizes // _ALIKE)):
        alike = np.flatnonzero(-(-sizes // _ALIKE) == size).tolist()
        smooth |= zip(alike, _smooth([found[at][0] for at in alike]), strict=True)
    return [Window(known, rest, smooth[at], _near(known, rest)) for at, (known, rest) in enumerate(found)]


def _smooth(windows: Sequence[Positions]) -> list[npt.NDArray[np.float32]]:
    """Return for each window a matrix `[1 + known, known]`. From the changes at `known` it gives the expected part that
    all tokens share, then the part that each of `known` shares with those near it.

    All windows are solved at once; shorter ones are padded with tokens that share nothing. This uses torch, not numpy:
    the threads of numpy's BLAS would keep waiting for work during the pass that follows.
    """
    sizes = np.array([len(known) for known in windows])
    there = np.arange(sizes.max()) < sizes[:, None]
    places = np.zeros(there.shape)
    places[there] = np.concatenate(windows)
    both = there[:, :, None] & there[:, None, :]
    near = torch.from_numpy(_NEAR * both * np.exp(-np.abs(places[:, :, None] - places[:, None, :]) / _REACH))
    common = torch.from_numpy(_COMMON * both)
    parts = torch.cat([torch.from_numpy(_COMMON * there[:, None]), near], dim=1)
    noise = _NOISE * torch.eye(there.shape[1], dtype=torch.float64)
    found = torch.linalg.solve(near + common + noise, parts, left=False).float()
    return [each[: 1 + size, :size].contiguous().numpy() for each, size in zip(found, sizes, strict=True)]


def _near(known: Positions, rest: Positions) -> npt.NDArray[Any]:
    """Return the share that each of `rest` is expected to have of the parts at its two neighbours in `known`. Beyond
    the first and the last of `known`, only the nearest counts."""
    right = np.searchsorted(known, rest)
    inside = (right > 0) & (right < len(known))
    near = np.stack([right - 1, right], axis=1).clip(0, len(known) - 1)
    one, other = np.exp(-np.abs(rest[:, None] - known[near]) / _REACH).T
    scale = np.where(inside, 1 / (1 - (one * other * inside) ** 2), 1)
    found = np.empty(len(rest), _NEIGHBOURS)
    found["known"] = near
    found["share"][:, 0] = np.where(inside, one * (1 - other**2) * scale, one)
    found["share"][:, 1] = np.where(inside, other * (1 - one**2) * scale, 0)
    return found
