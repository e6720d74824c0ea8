"""What this machine's processor is, as the operating system says it. Fixed while a process runs."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

# What a library may choose its kernels by, of the flags that Linux names; the others come and go with kernel versions.
_VECTOR_UNITS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "fphp", "sve", "sme", "bf16", "i8mm")
_WHO = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")  # x86, then ARM


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty elsewhere."""
    found = _cpuinfo()
    return frozenset((found.get("flags") or found.get("Features", "")).split())


def processor() -> str:
    """Architecture, vendor, model and vector units, in one line."""
    found = _cpuinfo()
    who = [found[name] for name in _WHO if name in found] or [platform.processor()]
    units = sorted(flag for flag in cpu_flags() if flag.startswith(_VECTOR_UNITS))
    return " ".join(filter(None, (platform.machine(), *who, *units)))


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
