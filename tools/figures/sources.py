"""Which file of results is of which commit and machine, and which step of `make bench-all` makes it."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.plan import STEPS

from tools.figures.results import records, run_of, table


def sources() -> str:
    rows = []
    for step in STEPS:
        for name in step.files:
            commit, day, machine = told(name)
            link = f"[{name}](../benchmarks/results/{name})"
            rows.append((link, commit, day, machine, kernels(name), f"`{step.name}`"))
    return table(("file", "commit", "when", "machine", "kernels", "step"), rows)


def told(name: str) -> tuple[str, str, str]:
    """A file's commit, day and machine."""
    run = run_of(name)
    machine = run["machine"]
    shown = f"{machine['processor']}, {machine['cores']} cores, `{machine['level']}`, {machine['memory_gib']} GiB"
    return f"`{run.get('ran', run['commit'])[:10]}`" + (" and more" if run["dirty"] else ""), run["when"], shown


def kernels(name: str) -> str:
    """The digest of the compiled code, where a record tells it."""
    for each in records(name):
        if found := re.findall(r"lean:(\w{8})", str(each.get("attention", ""))):
            return str(found[0])
    return ""


def note() -> str:
    """Whether all files are of one commit and one machine."""
    commit, machine = shared("commit"), shared("machine")
    if commit and machine:
        ran = any(run_of(name).get("ran", commit) != commit for step in STEPS for name in step.files)
        earlier = " Some were made on earlier commits, which differ in nothing that they depend on." if ran else ""
        return f"All files under [Sources](#sources) are of commit `{commit[:10]}`, made on one machine.{earlier}"
    return (
        "The files were not all made from one commit on one machine: [Sources](#sources) says of each from which one. "
        "`make bench-all` makes all of them from one."
    )


def shared(what: str) -> Any:
    """What all files of results tell alike of their run; None if they differ."""
    told = [run_of(name)[what] for step in STEPS for name in step.files]
    return told[0] if all(each == told[0] for each in told) else None


def machine() -> tuple[str, list[str]]:
    """The machine of most files, and the files of others."""
    of = {name: run_of(name)["machine"] for step in STEPS for name in step.files}
    found = max(of.values(), key=list(of.values()).count)
    level = LEVELS.get(found["level"], f"the level `{found['level']}`")
    cores = WORDS.get(found["cores"], found["cores"])
    others = [name for name, each in of.items() if each != found]
    return f"{cores} cores of an {found['processor']} with {level}", others


def benchmarks_machine() -> str:
    found, others = machine()
    but = f" Another machine made {', '.join(others)} ([Sources](#sources))." if others else ""
    return (
        f"The machine: {found}; no accelerator. It is shared, and its speed changes for hours. So ratios are "
        "paired within a round of one run, unless a table says otherwise. Times are medians. Ratios are medians, "
        "followed in brackets by their quartiles and the worst value, where a file has every round."
        f"{but}"
    )


def readme_machine() -> str:
    found, _ = machine()
    return (
        f"{found[0].upper()}{found[1:]}; SmolLM2-135M in bfloat16. Ratios are medians; behind them stand the quartiles "
        "and the worst round. [Benchmarks](docs/benchmarks.md) has all of it, and the file behind each number."
    )


LEVELS = {"amx": "matrix units (AMX)", "avx512-bf16": "AVX512_BF16"}
WORDS = {2: "two", 4: "four", 8: "eight"}

BLOCKS = {"sources": sources, "sources-note": note, "machine": benchmarks_machine, "readme-machine": readme_machine}
