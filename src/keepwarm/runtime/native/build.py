"""Compiles C++ once per machine, compiler and source, and keeps the library in the cache folder."""

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
QUANTIZED = "QUANTIZED"  # products with weights in blocks of few bits
ADAPTERS = "ADAPTERS"  # an adapter of its own for each row
TILES, PAIRS = "TILES", "PAIRS"  # bfloat16 by the matrix units (AMX), by pairs (AVX512_BF16)
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
    """The compiled library, and the digest of its machine code: part of the arithmetic identity.

    The same code gives the same bits, whatever compiled it. And one source gives other code where the compiler tunes it
    to another model of processor.
    """

    library: ctypes.CDLL
    digest: str


@functools.cache
def compiled(source: Path, *defines: str) -> Kernels | None:
    """A source's library, compiled if need be (some seconds); None, with a warning, where that is not possible.

    `$CXX` names the compiler; else c++, g++ or clang++ is taken. torch is imported before: they share its OpenMP
    runtime.
    """
    compiler = _compiler()
    if compiler is None:
        log.warning("no C++ compiler found (set CXX, or install g++): what is compiled elsewhere is done more slowly")
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
            "%s does not compile: what it does is done more slowly (%s)",
            source.name,
            said.decode(errors="replace").strip()[:500] or error,
        )
        return None


def done(returned: int) -> int:
    """What a compiled function returned. Raises MemoryError where it found no memory; it has changed nothing then."""
    if returned == _NO_MEMORY:
        raise MemoryError("the system gives no more memory to a compiled kernel")
    return returned


def kernels(*, in_blocks: bool = False, adapters: bool = False) -> Kernels | None:
    """The lean decoder's kernels, with what the processor has for bfloat16 and lets the process use. `in_blocks`: for
    weights in blocks (`blocks.py`), a library of its own; so are those for rows with `adapters`."""
    more = [*([QUANTIZED] if in_blocks else []), *([ADAPTERS] if adapters else [])]
    if _may_use_tiles():
        return compiled(_KERNELS, TILES, *more)
    return compiled(_KERNELS, *([PAIRS] if "avx512_bf16" in cpu_flags() else []), *more)


@functools.cache
def _may_use_tiles() -> bool:
    """Ask for the state of AMX's tiles, which Linux gives to a process that wants it; it holds for all threads."""
    if platform.machine() != "x86_64" or "amx_bf16" not in cpu_flags():
        return False
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0:
        return True
    log.warning("the system does not let this process use the matrix units: bfloat16 is computed without, more slowly")
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
    """Compile to a temporary file and rename it: another process sees a whole library or none."""
    log.info("compiling %s ...", command[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([*command, "-o", temporary], capture_output=True, timeout=_SECONDS, check=True)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
