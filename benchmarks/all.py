"""Every figure of README.md and the manual, from one commit, on one machine, unattended: `make bench-all`.

    python -m benchmarks.all [--only NAME ...] [--list] [--quick] [--dirty] [--results FOLDER]
                             [--models FOLDER] [--traces FOLDER] [--work FOLDER]

The steps of `plan.py` run one after another. Each writes into a folder of its own under `build/bench`. If it ends with
0, its files go to the folder of results, each behind a first line {"run": ...}: commit, machine, versions, when, how
long, and the commands. A step is skipped if its files were made on this machine, with these versions, from this commit,
or from one that differs in nothing they depend on (`inputs.py`); so a run that was broken off goes on where it stopped,
and a step that failed can be mended without making the others again.
A step that fails stops no other one. The last lines, and the exit status, tell what is missing.

`--models` has folders and GGUF files by the names in `plan.py`, `--traces` the request traces; both lie in `--work`
(.peers), if nothing else is said. `make figures` then puts the figures into the pages.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.execution import alone, execute, stoppable
from benchmarks.inputs import NOT_CODE, not_read_by
from benchmarks.plan import PEERS, RESULTS, ROOT, STEPS, Step

from keepwarm.runtime.demo_model import demo_model
from keepwarm.runtime.native.build import level
from keepwarm.runtime.processor import cpu_name

VERSIONS = ("torch", "transformers", "keepwarm")
PATIENCE = 4  # a step is ended when it takes so many times what it is expected to, and ten minutes
INSTALLING = 3600  # seconds until making an environment counts as failed


@dataclass(frozen=True)
class Here:
    """Where steps run: the commit, and the folders."""

    root: Path
    commit: str
    dirty: bool
    results: Path
    scratch: Path
    work: Path
    models: Path
    traces: Path
    quick: bool = False


class Missing(Exception):
    """What a step needs is not here."""


# ---- git ----


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def changed(root: Path) -> list[str]:
    """Files of the working tree that are not as in the commit; results and documents apart."""
    return git(root, "status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in NOT_CODE)).splitlines()


def same_code(root: Path, one: str, other: str, step: Step) -> bool:
    """Whether two commits differ in nothing that a step's figures depend on. An unknown commit differs."""
    command = ("git", "diff", "--quiet", one, other, "--", ".", *not_read_by(step, root))
    return one == other or subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0


# ---- what a file says of its run ----


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "level": level().name,
        "memory_gib": round(memory / 2**30),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def stamp(here: Here, step: Step, seconds: float) -> dict[str, Any]:
    return {
        "run": {
            "commit": here.commit,
            "dirty": here.dirty,
            "machine": machine(),
            "versions": versions(),
            "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "seconds": round(seconds),
            "command": " && ".join(step.commands),
            **({"peers": made} if (made := peers_of(step, here)) else {}),
            **({"quick": True} if here.quick else {}),
        }
    }


def peers_of(step: Step, here: Here) -> dict[str, str]:
    """What the environments of a step's peers were made of, as they tell it themselves (peers/environments.py)."""
    found = {}
    for need in step.needs:
        kind, _, name = need.partition(" ")
        for done in sorted((here.work / name).glob("complete-*")) if kind == "peer" else ():
            found[name] = done.name.removeprefix("complete-")
    return found


def stamp_of(file: Path) -> dict[str, Any] | None:
    """What a file's first line says of its run; None of a file without such a line, or that is not there."""
    if not file.exists():
        return None
    with file.open(encoding="utf-8") as lines:
        try:
            first = json.loads(next(lines, "{}"))
        except ValueError:
            return None
    run = first.get("run") if isinstance(first, dict) else None
    return run if isinstance(run, dict) and "commit" in run else None


def done(here: Here, step: Step) -> bool:
    """Whether all files of a step were made by the same code, on this machine, with these versions."""
    stamps = [stamp_of(here.results / name) for name in step.files]
    return not here.dirty and all(
        each is not None
        and not each["dirty"]
        and not each.get("quick")
        and each["command"] == " && ".join(step.commands)
        and each["machine"] == machine()
        and each["versions"] == versions()
        and same_code(here.root, each["commit"], here.commit, step)
        for each in stamps
    )


# ---- one step ----


def prepared(step: Step, here: Here) -> dict[str, str]:
    """What stands for the names in a step's commands. Raises Missing, and makes environments that are not there."""
    names = {
        "python": sys.executable,
        "out": str(here.scratch / step.name),
        "work": str(here.work),
        "models": str(here.models),
        "traces": str(here.traces),
    }
    if any("{demo}" in command for command in step.commands):
        names["demo"] = str(demo_model(print))
    for need in step.needs:
        kind, _, name = need.partition(" ")
        if kind == "model" and not (here.models / name).exists():
            raise Missing(f"there is no {here.models / name}")
        if kind == "traces" and not here.traces.is_dir():
            raise Missing(f"there is no {here.traces}")
        if kind not in ("model", "traces", "peer") and shutil.which(kind) is None:
            raise Missing(f"there is no {kind}")
        named = f"{{{name.replace('-', '_')}}}"  # --quick leaves peers out, unless a command runs in their environment
        if kind == "peer" and (not here.quick or named in step.commands[-1]):
            names[name.replace("-", "_")] = environment(name, here)
    return names


def environment(peer: str, here: Here) -> str:
    """The program of a peer's environment, which is made if it is not there. Raises Missing."""
    packages, _ = PEERS[peer]
    command = [sys.executable, "benchmarks/peers/environments.py", peer, str(here.work), *packages.split()]
    with (here.scratch / f"environment-{peer}.log").open("w+") as log:
        ended = execute(command, here.root, environ(here), log, INSTALLING)
        log.seek(0)
        told = log.read().split()  # its last word is the program
    if ended or not told:
        raise Missing(f"{peer} cannot be installed, {ended or 'it said nothing'}: see {log.name}")
    return told[-1]


def environ(here: Here) -> dict[str, str]:
    path = filter(None, (str(here.root / "src"), str(here.root), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def arguments(command: str, names: Mapping[str, str]) -> list[str]:
    """A command's words, with names and patterns of files replaced. Raises Missing if no file fits."""
    words: list[str] = []
    for word in shlex.split(command):
        filled = word.format_map(names)
        found = sorted(glob.glob(filled)) if "*" in filled else [filled]
        if not found:
            raise Missing(f"there is no {filled}")
        words += found
    return words


def run_step(step: Step, here: Here) -> float:
    """Run a step and keep its files. Returns the seconds. Raises Missing, or RuntimeError if it failed."""
    out = here.scratch / step.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    here.work.mkdir(parents=True, exist_ok=True)
    names = prepared(step, here)
    commands = [arguments(each, names) for each in (step.commands[-1:] if here.quick else step.commands)]
    if here.quick:
        commands[-1] += arguments(step.quick, names)
    log, began = here.scratch / f"{step.name}.log", time.monotonic()
    until = began + 600 + 60 * PATIENCE * step.minutes
    with log.open("w") as told:
        for command in commands:
            print(shlex.join(command), file=told, flush=True)
            if ended := execute(command, here.root, environ(here), told, until - time.monotonic()):
                raise RuntimeError(f"{ended}: see {log}")
    seconds = time.monotonic() - began
    if not here.dirty and (
        changed(here.root) or not same_code(here.root, here.commit, git(here.root, "rev-parse", "HEAD"), step)
    ):
        raise RuntimeError("the code was changed while it ran")
    keep(step, here, seconds)
    return seconds


def carry_over(step: Step, here: Here) -> None:
    """Write this commit into the stamps of files that were made from the same code. `ran` keeps the one they had."""
    for name in step.files:
        first, _, text = (here.results / name).read_text(encoding="utf-8").partition("\n")
        run = json.loads(first)["run"]
        if run["commit"] != here.commit:
            run = {**run, "commit": here.commit, "ran": run.get("ran", run["commit"])}
            replaced(here.results / name, f"{json.dumps({'run': run})}\n{text}")


def replaced(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def keep(step: Step, here: Here, seconds: float) -> None:
    """Put a step's files into the folder of results, each behind its stamp. Raises RuntimeError without one of them."""
    head = json.dumps(stamp(here, step, seconds))
    texts = {}
    for name in step.files:
        made = here.scratch / step.name / (step.made or name)
        text = made.read_text(encoding="utf-8") if made.exists() else ""
        if not text.strip():
            raise RuntimeError(f"it wrote no {made.name}")
        if lacking := [each for each in step.holds if each not in text and not here.quick]:
            raise RuntimeError(f"{made.name} has no {', '.join(lacking)}: see its log in {here.scratch}")
        texts[name] = f"{head}\n{text}"
    here.results.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replaced(here.results / name, text)


# ---- all of them ----


def run(steps: Sequence[Step], here: Here, say: Callable[[str], None] = print) -> dict[str, str]:
    """Run the steps that are not done. Returns why each of the others is missing."""
    here.scratch.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    left = sum(step.minutes for step in steps)
    for number, step in enumerate(steps, start=1):
        left -= step.minutes
        place = f"[{number}/{len(steps)}] {step.name}"
        if done(here, step):
            carry_over(step, here)
            say(f"{place}: is there, from this code")
            continue
        say(f"{place}: about {step.minutes:g} min, then {left:g} min more")
        try:
            seconds = run_step(step, here)
        except Exception as error:  # whatever it is, the other steps are run
            missing[step.name] = str(error) or repr(error)
            say(f"{place}: MISSING, {error}")
        else:
            say(f"{place}: done in {seconds:,.0f} s")
    return missing


def listed(steps: Sequence[Step], here: Here) -> str:
    """The plan: what each step makes and needs, how long it takes, and whether it is there."""
    lines = [f"{'step':14} {'minutes':8}  {'so far':12} what it makes, and what it needs beside .venv"]
    for step in steps:
        found = stamp_of(here.results / step.files[0])
        took = f"took {found['seconds'] / 60:.0f} min" if found else ""
        state = "is there" if done(here, step) else took
        needs = ", ".join(step.needs)
        lines.append(f"{step.name:14} {step.minutes:4g} min  {state:12} {' '.join(step.files)}  {needs}".rstrip())
    peers = {need.partition(" ")[2] for step in steps for need in step.needs if need.startswith("peer ")}
    once = sum(PEERS[peer][1] for peer in peers)
    total = sum(step.minutes for step in steps)
    return "\n".join([*lines, f"{total:g} min in all, and once {once:g} min for {len(peers)} environments"])


def chosen(names: Sequence[str] | None, quick: bool) -> list[Step]:
    """The steps of these names, or all. Raises SystemExit for an unknown one."""
    known = {step.name: step for step in STEPS}
    if unknown := sorted(set(names or ()) - set(known)):
        raise SystemExit(f"no step is named {', '.join(unknown)}; there are {', '.join(known)}")
    steps = [known[name] for name in names] if names else list(STEPS)
    return [step for step in steps if step.quick] if quick else steps


def main(given: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps, no others")
    parser.add_argument("--list", action="store_true", help="print the plan, and run nothing")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything works")
    parser.add_argument("--dirty", action="store_true", help="run code that is not committed; the files say so")
    parser.add_argument("--results", type=Path, help="another folder, say for another kind of machine")
    parser.add_argument("--work", type=Path, default=ROOT / ".peers", help="environments and files of models")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args(given)
    steps = chosen(options.only, options.quick)
    commit, dirty = git(root, "rev-parse", "HEAD"), changed(root)
    scratch = root / "build" / "bench" / f"{commit[:12]}{'-quick' * options.quick}"
    here = Here(
        root,
        commit,
        bool(dirty),
        (options.results or (scratch / "results" if options.quick else RESULTS)).resolve(),
        scratch,
        options.work.resolve(),
        (options.models or options.work / "models").resolve(),
        (options.traces or options.work / "traces").resolve(),
        options.quick,
    )
    if options.list:
        print(listed(steps, here))
        return 0
    if dirty and not (options.dirty or options.quick):
        print("\n".join(dirty[:10]), "\ncommit this first, or say --dirty", sep="", file=sys.stderr)
        return 2
    with alone(root / "build" / "bench"), stoppable():
        missing = run(steps, here, lambda text: print(text, flush=True))
    for name, why in missing.items():
        print(f"missing: {name}: {why}")
    print(f"{len(steps) - len(missing)} of {len(steps)} steps are in {here.results}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
