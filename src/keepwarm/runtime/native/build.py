"""Finds the libraries of our C++. A wheel brings them; otherwise they are compiled once for each machine and compiler,
and kept in the cache folder.

Both are made for a named level of instructions (`core.levels`), so the same level of one wheel is the same machine code
on every machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keepwarm.config import cache_dir
from keepwarm.core.levels import (
    DELIVERED,
    NATIVE,
    PAIRS,
    TILES,
    VARIABLE,
    Level,
    OpenMP,
    commands,
    kernels_defines,
    level_named,
    levels_of,
    library_name,
    machine,
)
from keepwarm.errors import ConfigError
from keepwarm.runtime.processor import cpu_flags, processor

log = logging.getLogger(__name__)

_KERNELS = Path(__file__).with_name("kernels.cpp")
READS = Path(__file__).with_name("reads.cpp")
CHUNKS = Path(__file__).with_name("chunks.cpp")
WATCH = Path(__file__).with_name("watch.cpp")
LANES = 16  # as in vectors.h
_NO_MEMORY = -1  # as in guarded.h

_SECONDS = 300
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # Linux, arch/x86/include/uapi/asm/prctl.h


@dataclass(frozen=True)
class Kernels:
    """The compiled library, and the digest of its machine code, which is part of the arithmetic identity.

    The same machine code gives the same bits, whatever compiled it. So a wheel's library and one that is compiled here
    are the same arithmetic if all their bytes are the same, and otherwise not.
    """

    library: ctypes.CDLL
    digest: str


def level() -> Level:
    """Return the instructions that compiled code uses in this process.

    That is the level that `$KEEPWARM_KERNELS` names; else the best one that this processor has and a wheel delivered
    libraries for; else the best one that the compiler knows. Raises ConfigError for a level that is unknown or that
    this processor does not have.
    """
    return _level(os.environ.get(VARIABLE, ""))


@functools.cache
def _level(asked: str) -> Level:
    able = levels_here()
    if asked:
        return _asked_level(asked, able)
    for each in able:
        if (_KERNELS.with_name(DELIVERED) / each.name).is_dir():
            return each
    compiler = _compiler()
    known = (each for each in able if compiler is None or _takes(compiler, each))
    return next(known, _native())


def _asked_level(name: str, able: Sequence[Level]) -> Level:
    try:
        found = level_named(name, machine())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found is NATIVE:
        return _native()
    if found not in able:
        here = ", ".join(each.name for each in (*able, NATIVE))
        raise ConfigError(f"{VARIABLE} names instructions that this processor does not have: {name}; it has {here}")
    return found


def levels_here() -> list[Level]:
    """Return the levels that this processor has, the best one first; none on systems other than Linux and macOS."""
    able = [each for each in levels_of(machine()) if each.needs <= cpu_flags()]
    return [each for each in able if each.narrow != TILES or _may_use_tiles()]


def _native() -> Level:
    """What this processor has, as the compiler finds out."""
    flags = NATIVE.flags if machine() == "x86_64" else ("-mcpu=native",)
    pairs = PAIRS if cpu_flags() & {"avx512_bf16", "bf16"} else ""
    return replace(NATIVE, flags=flags, narrow=TILES if _may_use_tiles() else pairs)


def compiled(source: Path, *defines: str) -> Kernels | None:
    """Return a source's library for this process's level. Compiles it if there is none yet, which takes half a minute
    at most. Returns None, with a warning, if that is not possible.

    `$CXX` names the compiler; else c++, g++ or clang++ is taken. Import torch first: the libraries share its OpenMP
    runtime. Raises ConfigError as `level` does.
    """
    return compiled_for(level(), source, *defines)


@functools.cache
def compiled_for(level: Level, source: Path, *defines: str) -> Kernels | None:
    """As `compiled`, for a level that this processor has."""
    _show_openmp()
    given = source.parent / DELIVERED / level.name / library_name(source, level, defines)
    if given.exists():
        try:
            return _opened(given)
        except OSError as error:
            log.warning("the wheel's library does not load, so it is compiled here: %s", error)
    return _compiled_here(level, source, defines)


def _compiled_here(level: Level, source: Path, defines: Sequence[str]) -> Kernels | None:
    compiler = _compiler()
    if compiler is None:
        _tell_of_no_compiler()
        return None
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
        here = " ".join([processor(), *sorted(cpu_flags())])
        what = [library_name(source, level, defines), here, " ".join(compiler[1:]), version.decode(errors="replace")]
        made_from = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
        path = cache_dir() / "native" / f"{made_from}.so"
        if not path.exists():
            _compile(compiler, source, level, defines, path, OpenMP.of(version, _torch()))
        return _opened(path)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        log.warning(
            "%s does not compile: slower code takes its place (%s)",
            source.name,
            said.decode(errors="replace").strip()[:500] or error,
        )
        return None


def _opened(path: Path) -> Kernels:
    return Kernels(ctypes.CDLL(str(path)), hashlib.sha256(path.read_bytes()).hexdigest()[:16])


@functools.cache
def _show_openmp() -> None:
    """Let libraries that are loaded from now on find torch's OpenMP runtime: they name none themselves."""
    for name in (*map(str, sorted((_torch() / "lib").glob("libgomp*"))), "libgomp.so.1"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    return Path((found and found.origin) or "torch").parent


def done(returned: int) -> int:
    """Return what a compiled function returned. Raises MemoryError if it got no memory; then it changed nothing."""
    if returned == _NO_MEMORY:
        raise MemoryError("the system gives no more memory to a compiled kernel")
    return returned


def kernels(*, in_blocks: bool = False, adapters: bool = False) -> Kernels | None:
    """Return the lean decoder's kernels, with this process's level's units for bfloat16. With `in_blocks`, return the
    separate library for weights in blocks (`blocks.py`); with `adapters`, the one for rows with adapters."""
    return compiled(_KERNELS, *kernels_defines(level(), in_blocks=in_blocks, adapters=adapters))


@functools.cache
def _may_use_tiles() -> bool:
    """Ask Linux for permission to use AMX's tiles, and return whether it is given. It holds for all threads."""
    if platform.machine() != "x86_64" or "amx_bf16" not in cpu_flags():
        return False
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0:
        return True
    log.warning("the system does not let this process use the matrix units: bfloat16 is computed more slowly")
    return False


def _compiler() -> list[str] | None:
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["c++", "g++", "clang++"]
    for name in names:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return None


@functools.cache  # once is enough: each library would say it
def _tell_of_no_compiler() -> None:
    log.warning("no C++ compiler found (set CXX, or install g++): Keepwarm runs more slowly without its compiled code")


def _takes(compiler: Sequence[str], level: Level) -> bool:
    """Whether a compiler knows a level's instructions."""
    command = [*compiler, *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _compile(
    compiler: Sequence[str], source: Path, level: Level, defines: Sequence[str], path: Path, openmp: OpenMP
) -> None:
    """Compile to a temporary file and rename it: another process sees a whole library or none."""
    log.warning("compiling Keepwarm's %s for %s, once", source.name, level.name)  # shown without any logging set up
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        for command in commands(compiler, source, level, defines, made, openmp):
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        os.replace(made, path)
