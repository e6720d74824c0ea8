"""This machine's processor, as the operating system describes it. It does not change while a process runs."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

# Linux's flags by which a library may choose its kernels; other flags change with the version of Linux.
_VECTOR_UNITS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "fphp", "sve", "sme", "bf16", "i8mm")
_WHO = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")  # x86, then ARM


def cpu_flags() -> frozenset[str]:
    """Return instruction set flags as Linux names them; empty on other systems."""
    found = _cpuinfo()
    return frozenset((found.get("flags") or found.get("Features", "")).split())


def cpu_name() -> str:
    """Return the processor's name as people know it, or its architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def processor() -> str:
    """Return architecture, vendor, model and vector units, in one line."""
    found = _cpuinfo()
    who = [found[name] for name in _WHO if name in found] or [platform.processor()]
    units = sorted(flag for flag in cpu_flags() if flag.startswith(_VECTOR_UNITS))
    return " ".join(filter(None, (platform.machine(), *who, *units)))


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """Return Linux's description of the first processor; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
