"""Makes `.venv` for `make`: Keepwarm from this checkout, what it needs, and its kernels, and shows how far it is.

    python3 tools/install.py [EXTRA]

Where no NVIDIA GPU is seen, torch is its build for the CPU. The variable `TORCH=cuda` asks for the usual one.
The kernels are compiled while packages are fetched, by the commands that fill a wheel. They lie where a wheel's do, so
the first model loads at once. It uses the standard library alone, and no package of Keepwarm's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "keepwarm" / "runtime" / "native"
BESIDE = ("reads.cpp", "watch.cpp", "chunks.cpp", "codecs.cpp", "blocks.cpp", "twelve.cpp")
CPU_BUILD = "https://download.pytorch.org/whl/cpu"
ASKING = 5.0  # seconds that it may take to answer
GPU = Path("/dev/nvidia0")
WIDE = 24  # characters of a bar
CLEAR = "\r\x1b[K"  # of a terminal's line
EVERY = 0.1  # seconds between two drawings
_TOLD = re.compile(r"\s*(?:Collecting|Processing|Downloading|Building|Installing|Preparing|Obtaining)\b.*")
_OWN_INDEX = re.compile(r"\.(?:index-url|extra-index-url|find-links|no-index)=.[^'\"]")
_UNPACKED = "Installing collected packages: "


class Shown:
    """The line of progress: redrawn in a terminal; elsewhere one line for each step and one when it is done."""

    def __init__(self) -> None:
        self.drawn = sys.stderr.isatty()
        self.beside: Callable[[], str] = str

    def line(self, name: str, share: float | None, began: float, text: str) -> None:
        """Draw a step. `share` of it is done; None where that is not known: then a part of the bar wanders."""
        if not self.drawn:
            return
        seconds = time.monotonic() - began
        if share is None:
            at = int(seconds * 8) % (2 * (WIDE - 6))
            at = min(at, 2 * (WIDE - 6) - at)
            bar = "─" * at + "━" * 6 + "─" * (WIDE - 6 - at)
        else:
            done = int(WIDE * min(share, 1.0))
            bar = "━" * done + "─" * (WIDE - done)
        said = f"{name:<9} {bar} {seconds:4.0f} s  {self.beside()}{text}"
        print(CLEAR + said[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)

    def begin(self, name: str) -> None:
        if not self.drawn:
            print(f"{name} ...", file=sys.stderr, flush=True)

    def done(self, name: str, began: float) -> None:
        self.say(f"{name:<9} done in {time.monotonic() - began:.0f} s")

    def say(self, text: str) -> None:
        print((CLEAR if self.drawn else "") + text, file=sys.stderr, flush=True)


class Kernels(threading.Thread):
    """Compiles this machine's kernels. Where that is not possible it does nothing: they are compiled at first use."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.did, self.all = 0, 0
        self.why = ""

    def run(self) -> None:
        with self._told():
            self._compile()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, subprocess.SubprocessError) as error:
            self.why = f"not compiled ({error}): a model's first load does it"

    def told(self) -> str:
        return f"[kernels {self.did} of {self.all}] " if self.all and self.is_alive() else ""

    def _compile(self) -> None:
        levels = by_path("levels", "core/levels.py")
        flags = by_path("processor", "runtime/processor.py").cpu_flags()
        compiler = [os.environ.get("CXX") or "g++"]
        if not gnu(compiler) or os.environ.get(levels.VARIABLE):
            return
        able = (each for each in levels.levels_of(levels.machine()) if each.needs <= flags)
        level = next((each for each in able if takes(compiler, each)), None)
        if level is None:
            return
        plain = levels.kernels_defines(level, in_blocks=False, adapters=False)
        wanted = [(SOURCES / "kernels.cpp", plain), *((SOURCES / name, ()) for name in BESIDE)]  # the longest is first
        folder = SOURCES / levels.DELIVERED
        named = {
            folder / level.name / levels.library_name(source, level, more): (source, more) for source, more in wanted
        }
        for old in set(folder.glob("*/*")) - named.keys():  # of earlier sources
            old.unlink()
        missing = {to: what for to, what in named.items() if not to.exists()}
        self.all = len(missing)
        (folder / level.name).mkdir(parents=True, exist_ok=True)
        waiting = iter([*missing.items()])  # shared by the threads

        def work() -> None:
            with self._told():
                for to, (source, more) in waiting:
                    part = to.with_suffix(".part")
                    for command in levels.commands(compiler, source, level, more, part, levels.OpenMP()):
                        subprocess.run(command, check=True, capture_output=True)
                    part.with_suffix(".o").unlink()
                    part.rename(to)
                    self.did += 1

        threads = [threading.Thread(target=work, daemon=True) for _ in range(os.cpu_count() or 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def by_path(name: str, path: str) -> ModuleType:
    """A module of the package that needs the standard library alone. The package itself is not installed yet."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "src" / "keepwarm" / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gnu(compiler: Sequence[str]) -> bool:
    """Whether it is GCC, on Linux: others need torch's OpenMP to link with."""
    if sys.platform != "linux" or shutil.which(compiler[0]) is None:
        return False
    said = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    return b"Free Software Foundation" in said


def takes(compiler: Sequence[str], level: Any) -> bool:
    """Whether a compiler knows a level's instructions."""
    command = [*compiler, *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def step(shown: Shown, name: str, command: Sequence[str], log: Path, share: Callable[[str], float | None]) -> None:
    """Run a command, and draw how far it is from what it prints. Its whole output goes to `log`. Exits if it fails."""
    began = time.monotonic()
    shown.begin(name)
    told: list[str] = []
    with log.open("a", encoding="utf-8") as kept:
        kept.write(" ".join(command) + "\n")
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        reader = threading.Thread(target=read, args=(running, told, kept))
        reader.start()
        try:
            while reader.is_alive():
                last = told[-1] if told else ""
                shown.line(name, share(last), began, last)
                reader.join(EVERY)
        except BaseException:  # Ctrl-C: when this is over, nothing writes any more
            running.terminate()
            reader.join()
            raise
    if running.wait():
        print(f"\n{log.read_text(encoding='utf-8')[-3000:]}\n{name} failed; all of it is in {log}", file=sys.stderr)
        raise SystemExit(running.returncode)
    shown.done(name, began)


def read(running: subprocess.Popen[str], told: list[str], kept: TextIO) -> None:
    """Keep what a command prints, and of it what says where it is."""
    assert running.stdout is not None
    for line in running.stdout:
        kept.write(line)
        if _TOLD.match(line):
            told.append(line.strip())


def unpacked(site: Path) -> Callable[[str], float | None]:
    """How much of the packages that pip is unpacking lies there, by their number."""
    before: list[int] = []

    def share(last: str) -> float | None:
        if not last.startswith(_UNPACKED):
            return None
        here = sum(1 for _ in site.glob("*.dist-info"))
        before.append(here)
        return (here - before[0]) / (last.count(",") + 1)

    return share


def environment(venv: Path) -> Path:
    """Make the virtual environment if there is none, or one that was broken off. Returns its interpreter."""
    python, making = venv / "bin" / "python", venv / ".making"
    if making.exists():
        shutil.rmtree(venv)
    if python.exists():
        return python
    log = venv.with_name(f"{venv.name}.log")
    log.unlink(missing_ok=True)
    venv.mkdir(exist_ok=True)
    making.touch()
    try:
        step(Shown(), "venv", [sys.executable, "-m", "venv", str(venv)], log, lambda last: None)
    except BaseException as error:
        shutil.rmtree(venv, ignore_errors=True)
        if isinstance(error, SystemExit):
            raise SystemExit("no virtual environment: apt install python3-venv") from None
        raise
    log.rename(venv / "install.log")
    making.unlink()
    return python


def torch_options(python: Path, site: Path, shown: Shown) -> list[str]:
    """Return pip's options for torch.

    On Linux with an x86-64 processor the package index has torch with CUDA, of some gigabytes. Without a GPU, the build
    for the CPU is taken from where torch keeps it, unless pip was set up to ask an index of the user's. Exits if $TORCH
    is unknown.
    """
    asked = os.environ.get("TORCH", "")
    if asked not in ("", "cuda"):
        raise SystemExit(f"TORCH is cuda, or not set, got {asked!r}")
    if there := [each.name for each in site.glob("torch-*.dist-info")]:
        if asked and "+cpu" in there[0]:
            shown.say("torch     its build for the CPU is there, and stays: `make clean` first")
        return []
    if asked or GPU.exists() or shutil.which("nvidia-smi") or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return []
    told = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if _OWN_INDEX.search(told.stdout):
        return []
    if not answers(f"{CPU_BUILD}/torch/", ASKING):
        shown.say(f"torch     {CPU_BUILD} does not answer: it comes from the package index, with CUDA (gigabytes)")
        return []
    shown.say("torch     its build for the CPU, as no NVIDIA GPU is seen; TORCH=cuda, behind make, asks for the other")
    return ["--no-deps", "--index-url", CPU_BUILD]  # what it needs comes with the packages


def answers(url: str, seconds: float) -> bool:
    """Whether a server answers in time. Looking its name up has no timeout, so that is done beside."""
    said: list[int] = []

    def ask() -> None:
        with suppress(OSError, HTTPException), urlopen(Request(url, method="HEAD"), timeout=seconds) as answer:
            said.append(answer.status)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(said)


def main(extra: str = "") -> None:
    began = time.monotonic()
    kernels, shown = Kernels(), Shown()
    kernels.start()
    shown.beside = kernels.told
    python = environment(ROOT / ".venv")
    log = ROOT / ".venv" / "install.log"
    (site,) = (ROOT / ".venv" / "lib").glob("python*/site-packages")
    # Modules are compiled when they are first imported: most never are. torch goes first, so that the pinned build is
    # in place when other packages ask for any torch.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "-c", "constraints.txt"]
    step(shown, "torch", [*pip, *torch_options(python, site, shown), "torch"], log, unpacked(site))
    step(shown, "packages", [*pip, "-e", f".[{extra}]" if extra else "."], log, unpacked(site))
    if extra == "dev":
        step(shown, "bfcl-eval", [*pip, "--no-deps", "bfcl-eval"], log, unpacked(site))
    waiting = time.monotonic()
    while kernels.is_alive():
        shown.line("kernels", kernels.did / kernels.all if kernels.all else None, waiting, "")
        kernels.join(EVERY)
    shown.say(f"ready in {time.monotonic() - began:.0f} s")
    if kernels.did or kernels.why:
        shown.say(f"kernels   {kernels.why or f'{kernels.did} compiled beside it'}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted: the same command goes on") from None
