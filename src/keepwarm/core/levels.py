"""The instruction sets that compiled code comes in, and how it is compiled for each.

A wheel's libraries and those that are compiled at first use are made by the same commands. `setup.py` loads this file
by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

VARIABLE = "KEEPWARM_KERNELS"  # names the level that a process takes
DELIVERED = "delivered"  # folder beside the sources: a wheel's libraries, by level
QUANTIZED = "QUANTIZED"  # defined for products with weights in blocks of few bits
ADAPTERS = "ADAPTERS"  # defined for steps whose rows each have an adapter of their own
TILES, PAIRS = "TILES", "PAIRS"  # defined for bfloat16 by matrix units (AMX), and by pairs (AVX512_BF16, bfdot)


@dataclass(frozen=True)
class Level:
    """Instructions that a library may use. Its code is the same on every processor that has them."""

    name: str
    machine: str  # as `machine` returns it; empty for any
    needs: frozenset[str]  # what a processor must have, as Linux names it
    flags: tuple[str, ...]  # of the compiler
    narrow: str = ""  # what multiplies bfloat16: TILES or PAIRS, if anything does


# What Linux calls it, and the compiler's flag. Each level has what the one before it has.
_AVX2 = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "bmi1": "-mbmi",
    "bmi2": "-mbmi2",
    "abm": "-mlzcnt",
    "movbe": "-mmovbe",
    "popcnt": "-mpopcnt",
}
_AVX512 = _AVX2 | {f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
_VNNI = _AVX512 | {"avx512_vnni": "-mavx512vnni"}
_BF16 = _VNNI | {"avx512_bf16": "-mavx512bf16"}
_AMX = _BF16 | {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"}


def _x86(name: str, units: Mapping[str, str], narrow: str = "", tune: str = "generic") -> Level:
    wide = ["-mprefer-vector-width=512"] if "avx512f" in units else []
    flags = ("-march=x86-64", f"-mtune={tune}", *wide, *units.values())  # none is left to how a compiler was set up
    return Level(name, "x86_64", frozenset(units), flags, narrow)


_DOTPROD = {"asimd", "fphp", "asimdhp", "atomics", "asimdrdm", "asimddp"}

LEVELS = (  # of each machine the best one first
    _x86("amx", _AMX, TILES),
    _x86("avx512-bf16", _BF16, PAIRS, tune="znver3"),  # mostly Zen 4 and 5, which GCC 12 does not know: 2 % of a step
    _x86("avx512-vnni", _VNNI),
    _x86("avx512", _AVX512),
    _x86("avx2-vnni", _AVX2 | {"avx_vnni": "-mavxvnni"}),
    _x86("avx2", _AVX2),
    Level(
        "neon-bf16",
        "aarch64",
        frozenset(_DOTPROD | {"i8mm", "bf16"}),
        ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",),
        PAIRS,
    ),
    Level("neon-i8mm", "aarch64", frozenset(_DOTPROD | {"i8mm"}), ("-march=armv8.2-a+fp16+dotprod+i8mm",)),
    Level("neon-dotprod", "aarch64", frozenset(_DOTPROD), ("-march=armv8.2-a+fp16+dotprod",)),
    Level("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
NATIVE = Level("native", "", frozenset(), ("-march=native",))  # whatever this very processor has; in no wheel

_COMPILE = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-g0", "-w")
_PLAIN = (
    "blocks.cpp",
    "chunks.cpp",
    "codecs.cpp",
    "reads.cpp",
    "twelve.cpp",
    "watch.cpp",
)  # a wheel has one of each, per level


def machine() -> str:
    """Return this machine's architecture. Systems have different names for one."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(found := platform.machine(), found)


def levels_of(architecture: str) -> tuple[Level, ...]:
    """Return an architecture's levels, the best one first."""
    return tuple(level for level in LEVELS if level.machine == architecture)


def level_named(name: str, architecture: str) -> Level:
    """Return the level of that name. Raises ValueError, which lists the names, if this architecture has none."""
    known = {level.name: level for level in (*levels_of(architecture), NATIVE)}
    if name not in known:
        raise ValueError(f"{VARIABLE} is one of {', '.join(known)} on {architecture}, got {name!r}")
    return known[name]


def kernels_defines(level: Level, *, in_blocks: bool, adapters: bool) -> tuple[str, ...]:
    """Return what is defined for `kernels.cpp`."""
    more = [*([QUANTIZED] if in_blocks else []), *([ADAPTERS] if adapters else [])]
    return (*([level.narrow] if level.narrow else []), *more)


def delivered(folder: Path, level: Level) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the sources, and what is defined for them, that a wheel has a library of."""
    for in_blocks, adapters in product((False, True), repeat=2):
        yield folder / "kernels.cpp", kernels_defines(level, in_blocks=in_blocks, adapters=adapters)
    for source in _PLAIN:
        yield folder / source, ()


def library_name(source: Path, level: Level, defines: Sequence[str]) -> str:
    """Return the file name of a wheel's library. A digest in it covers sources and flags, so that a library of other
    sources is not found."""
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    flags = " ".join([*_COMPILE, *level.flags, *defines]).encode()
    parts = b"\0".join(hashlib.sha256(part).digest() for part in (source.read_bytes(), *headers, flags))
    what = "-".join([source.stem, *(name.lower() for name in defines)])
    return f"{what}-{hashlib.sha256(parts).hexdigest()[:16]}.so"


@dataclass(frozen=True)
class OpenMP:
    """Flags for threads. GCC's library is not named where we link: a process takes the one that torch has loaded."""

    compile: tuple[str, ...] = ("-fopenmp",)
    link: tuple[str, ...] = ()

    @classmethod
    def of(cls, version: bytes, torch: Path) -> OpenMP:
        """Flags for the compiler that says this about its version. `torch` is the package's folder."""
        if sys.platform == "darwin":  # Apple's compiler has none of its own; torch brings header and library
            lib = torch / "lib"
            return cls(
                ("-Xpreprocessor", "-fopenmp", f"-I{torch / 'include'}"), (f"-L{lib}", "-lomp", f"-Wl,-rpath,{lib}")
            )
        return cls() if b"Free Software Foundation" in version else cls(link=("-fopenmp",))


def commands(
    compiler: Sequence[str], source: Path, level: Level, defines: Sequence[str], to: Path, openmp: OpenMP
) -> tuple[list[str], list[str]]:
    """Return the two commands that make a library: one compiles to an object file beside `to`, one links."""
    part = to.with_suffix(".o")
    compiled = [*compiler, *_COMPILE, *openmp.compile, *level.flags, *(f"-D{name}" for name in defines)]
    strip = ("-Wl,-undefined,dynamic_lookup",) if sys.platform == "darwin" else ("-s",)
    return (
        [*compiled, "-c", str(source), "-o", str(part)],
        [*compiler, "-shared", *strip, str(part), *openmp.link, "-o", str(to)],
    )
