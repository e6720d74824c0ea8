"""The machine: processor, memory, packages, compiled kernels, devices."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from keepwarm.cli import output
from keepwarm.cli.doctor.finding import Finding
from keepwarm.config import cache_dir
from keepwarm.core.levels import VARIABLE, Level
from keepwarm.errors import ConfigError

_LITTLE_MEMORY = 2 << 30  # bytes; the demo model with its KV takes about half of it
_CACHE_SPACE = 1 << 30  # bytes: the demo model, its download and compiled kernels
_EXTRAS = {  # a package that shows whether an extra is installed
    "serve": "uvicorn",
    "constrain": "llguidance",
    "crypto": "cryptography",
    "redis": "redis",
    "objects": "obstore",
}


def machine() -> Finding:
    """Processor, memory and versions."""
    free, whole = _memory()
    seen = [f"{platform.system()} on {platform.machine()}", output.counted(_cores(), "core")]
    if whole:
        seen.append(f"{output.in_bytes(free)} of {output.in_bytes(whole)} of memory free")
    versions = _versions()
    told = [f"{package} {found or 'not installed'}" for package, found in versions.items()]
    detail = ", ".join([*seen, f"Python {platform.python_version()}", *told])
    if missing := [package for package in ("torch", "transformers") if not versions[package]]:
        return Finding("machine", "fail", detail, f"pip install {' '.join(missing)}")
    if whole and free < _LITTLE_MEMORY:
        return Finding(
            "machine", "warn", detail, "little memory is free: close programs, or cap KV with --max-ram 256MiB"
        )
    return Finding("machine", "ok", detail)


def packages() -> Finding:
    """Which of the optional packages are there."""
    there = [extra for extra, package in _EXTRAS.items() if find_spec(package) is not None]
    missing = [extra for extra in _EXTRAS if extra not in there]
    detail = f"installed: {', '.join(there) or 'none of the extras'}"
    if missing:
        detail += f"; not installed: {', '.join(missing)} (pip install 'keepwarm[{','.join(missing)}]' when needed)"
    return Finding("packages", "ok", detail)


def cache_folder() -> Finding:
    """The folder of what can be made again: the demo model, compiled kernels."""
    folder = cache_dir()
    above = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    detail = f"{folder} (KEEPWARM_CACHE names another one)"
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        cure = "name another folder with KEEPWARM_CACHE"
        return Finding("cache", "fail", f"{detail}: {above} cannot be written", cure)
    free = shutil.disk_usage(above).free
    detail += f", {output.in_bytes(free)} free on its disk"
    if free < _CACHE_SPACE:
        return Finding("cache", "warn", detail, "make room, or name another folder with KEEPWARM_CACHE")
    return Finding("cache", "ok", detail)


def kernels() -> Finding:
    """Keepwarm's own kernels for the processor, compiled now if they were not yet."""
    _need_torch()  # the kernels share its OpenMP runtime
    from keepwarm.runtime.native.build import kernels as build
    from keepwarm.runtime.native.build import level

    try:
        units = _units(level())
    except ConfigError as error:
        return Finding("kernels", "fail", str(error), f"name one of them with {VARIABLE}, or unset it")
    with output.working("looking at the kernels; the first time, they are compiled"):
        found = build()
    if found is None:
        return Finding(
            "kernels",
            "warn",
            f"{units}; not compiled: on it models run through transformers, more slowly, and reuse ends at whole steps",
            "install a C++ compiler (apt install g++), or name one in CXX; the line above says what it said, if it ran",
        )
    return Finding("kernels", "ok", f"{units}; compiled, code {found.digest}")


def device(asked: str | None) -> Finding:
    """The device that models run on. `asked`: the one that is named in the settings."""
    _need_torch()
    import torch

    present = ["cpu"]
    if torch.backends.mps.is_available():
        present.insert(0, "mps")
    if torch.cuda.is_available():
        present = [f"cuda:{n}" for n in range(torch.cuda.device_count())] + present
    chosen = asked or present[0]
    detail = f"{chosen}; present: {', '.join(present)}"
    if chosen.partition(":")[0] not in {each.partition(":")[0] for each in present} or (
        ":" in chosen and chosen not in present
    ):
        return Finding("device", "fail", detail, f"ask for {present[0]!r}, or leave --device out")
    if chosen.startswith("cuda"):
        index = int(chosen.partition(":")[2] or 0)
        free, whole = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        detail += f"; {name}, {output.in_bytes(free)} of {output.in_bytes(whole)} free"
    return Finding("device", "ok", detail)


def _units(level: Level) -> str:
    """The instructions that compiled code takes, in words."""
    named = f" (by ${VARIABLE})" if os.environ.get(VARIABLE) else ""
    return f"level {level.name}{named}, {'bfloat16' if level.narrow else 'float32'} by default"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str]:
    """The versions of packages; empty for one that is not installed."""
    found = {}
    for package in ("keepwarm", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _need_torch() -> None:
    """Import torch. Raises ImportError, whatever is broken in it."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        raise ImportError(f"torch cannot be imported ({error})") from error


def _memory() -> tuple[int, int]:
    """Free and whole memory in bytes, as Linux tells them; zeros elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)}
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)
