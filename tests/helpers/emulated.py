"""The matrix units' kernels with these units emulated, for a processor that has all the rest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from keepwarm.core import levels
from keepwarm.runtime.native import build

_TILES = Path(__file__).parents[1] / "runtime" / "native" / "emulated_tiles.h"
_DIGEST = hashlib.sha256(_TILES.read_bytes()).hexdigest()[:8]  # so that a changed one is compiled anew

EMULATED = [
    replace(
        level,
        name="amx-emulated",
        narrow=levels.TILES,
        flags=(*level.flags, f"-DEMULATED_BY_{_DIGEST}", "-include", str(_TILES)),
    )
    for level in build.levels_here()
    if level.narrow == levels.PAIRS
]


def emulated() -> build.Kernels | None:
    """The kernels; None where nothing is to be emulated, or nothing compiles."""
    if not EMULATED:
        return None
    defines = levels.kernels_defines(EMULATED[0], in_blocks=False, adapters=False)
    return build.compiled_for(EMULATED[0], build._KERNELS, *defines)
