"""What pyproject.toml cannot say: a wheel for Linux holds compiled C++.

`KEEPWARM_WHEEL` names the architecture, `x86_64` or `aarch64`; another one than this machine's is cross-compiled.
`none` leaves the libraries out, so that each machine compiles at first use. Unset: this machine's, as far as its
compiler goes.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path("src/keepwarm/runtime/native")
GNU = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}


def _levels() -> Any:
    """`keepwarm.core.levels`, without the package, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("levels", "src/keepwarm/core/levels.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["levels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


levels = _levels()
ASKED = os.environ.get("KEEPWARM_WHEEL", "")


def architecture() -> str:
    """Return the architecture to compile for; empty for none."""
    if ASKED in GNU:
        return ASKED
    if ASKED not in ("", "none"):
        raise SystemExit(f"KEEPWARM_WHEEL is one of {', '.join(GNU)}, none, got {ASKED!r}")
    here = levels.machine()
    if ASKED == "none" or sys.platform != "linux" or here not in GNU:
        return ""
    return here if shutil.which(compiler(here)[0]) else ""


def compiler(target: str) -> list[str]:
    """Return the command of the compiler for an architecture: `$CXX`, else GCC's."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++" if target == levels.machine() else GNU[target]]


class BuildPy(build_py):
    """Copies the package, and compiles what a wheel holds beside it."""

    def run(self) -> None:
        super().run()
        target = architecture()
        folder = Path(self.build_lib, "keepwarm", "runtime", "native", levels.DELIVERED)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build, perhaps of other sources
        if target and not self.editable_mode:
            compile_all(compiler(target), target, folder)
        elif not self.editable_mode:
            print("no kernels are compiled: each machine does it at first use")


def compile_all(command: list[str], target: str, folder: Path) -> None:
    """Compile every library of an architecture's levels into `folder`, some at a time."""
    made = []
    for level in levels.levels_of(target):
        if not takes(command, level):
            if ASKED:
                raise SystemExit(
                    f"{command[0]} does not know {' '.join(level.flags)}: take a newer one, or another CXX"
                )
            print(f"no kernels for {level.name}: {command[0]} does not know these instructions")
            continue
        into = folder / level.name
        into.mkdir(parents=True)
        for source, defines in levels.delivered(SOURCES, level):
            to = into / levels.library_name(source, level, defines)
            made.append(levels.commands(command, source, level, defines, to, levels.OpenMP()))
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for to in workers.map(run, made):
            to.unlink()


def run(commands: tuple[list[str], list[str]]) -> Path:
    """Compile and link one library. Return the object file."""
    for command in commands:
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)
    return Path(commands[0][-1])


def takes(command: list[str], level: Any) -> bool:
    """Whether a compiler knows a level's instructions."""
    try:
        tried = [*command, *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise SystemExit(f"no compiler for the kernels: {error}; KEEPWARM_WHEEL=none leaves them out") from None


class BdistWheel(bdist_wheel):
    """Tags a wheel with libraries by its platform. They use no interface of one version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        target = architecture()
        return ("py3", "none", f"linux_{target}") if target else super().get_tag()


class WithLibraries(Distribution):
    """A distribution that belongs to a platform if it has compiled libraries."""

    def has_ext_modules(self) -> bool:
        return bool(architecture())


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel}, distclass=WithLibraries)
