"""Compiles C++ once for each machine, compiler and source, and keeps the library in the cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from keepwarm.config import cache_dir
from keepwarm.runtime.processor import cpu_flags, processor

log = logging.getLogger(__name__)

_KERNELS = Path(__file__).with_name("kernels.cpp")
READS = Path(__file__).with_name("reads.cpp")
CHUNKS = Path(__file__).with_name("chunks.cpp")
WATCH = Path(__file__).with_name("watch.cpp")
LANES = 16  # as in vectors.h
_NO_MEMORY = -1  # as in guarded.h
QUANTIZED = "QUANTIZED"  # builds products with weights in blocks of few bits
ADAPTERS = "ADAPTERS"  # builds steps whose rows each have an adapter of their own
TILES, PAIRS = "TILES", "PAIRS"  # build products of bfloat16 for the matrix units (AMX), or for pairs (AVX512_BF16)
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-w",
]

_SECONDS = 300
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # Linux, arch/x86/include/uapi/asm/prctl.h


@dataclass(frozen=True)
class Kernels:
    """The compiled library, and the digest of its machine code, which is part of the arithmetic identity.

    The same machine code gives the same bits, whatever compiled it. One source can give different machine code, because
    the compiler tunes it to the processor.
    """

    library: ctypes.CDLL
    digest: str


@functools.cache
def compiled(source: Path, *defines: str) -> Kernels | None:
    """Return a source's library. Compiles it if it is not kept yet, which takes some seconds. Returns None, with a
    warning, if that is not possible.

    `$CXX` names the compiler; else c++, g++ or clang++ is taken. Import torch first: the libraries share its OpenMP
    runtime.
    """
    compiler = _compiler()
    if compiler is None:
        log.warning(
            "no C++ compiler found (set CXX, or install g++): Keepwarm runs more slowly without its compiled code"
        )
        return None
    try:
        flags = [*_FLAGS, *(f"-D{name}" for name in defines)]
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
        machine = " ".join([processor(), *sorted(cpu_flags())]).encode()
        headers = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
        parts = (source.read_bytes(), *headers, version, machine, " ".join([*compiler[1:], *flags]).encode())
        made_from = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
        path = cache_dir() / "native" / f"{made_from}.so"
        if not path.exists():
            _compile([*compiler, *flags, str(source)], path)
        return Kernels(ctypes.CDLL(str(path)), hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        log.warning(
            "%s does not compile: slower code takes its place (%s)",
            source.name,
            said.decode(errors="replace").strip()[:500] or error,
        )
        return None


def done(returned: int) -> int:
    """Return what a compiled function returned. Raises MemoryError if it got no memory; then it changed nothing."""
    if returned == _NO_MEMORY:
        raise MemoryError("the system gives no more memory to a compiled kernel")
    return returned


def kernels(*, in_blocks: bool = False, adapters: bool = False) -> Kernels | None:
    """Return the lean decoder's kernels. They use the processor's units for bfloat16 if the system allows it. With
    `in_blocks`, return the separate library for weights in blocks (`blocks.py`); with `adapters`, the one for rows with
    adapters."""
    more = [*([QUANTIZED] if in_blocks else []), *([ADAPTERS] if adapters else [])]
    if _may_use_tiles():
        return compiled(_KERNELS, TILES, *more)
    return compiled(_KERNELS, *([PAIRS] if "avx512_bf16" in cpu_flags() else []), *more)


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


def _compile(command: list[str], path: Path) -> None:
    """Compile to a temporary file and rename it, so that other processes never see half a library."""
    log.info("compiling %s ...", command[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([*command, "-o", temporary], capture_output=True, timeout=_SECONDS, check=True)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
