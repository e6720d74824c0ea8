"""Which file of results is of which commit and machine, and which step of `make bench-all` makes it."""

from __future__ import annotations

import re

from benchmarks.plan import STEPS

from tools.figures.results import earlier, records, run_of, table


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
    if run := run_of(name):
        machine = run["machine"]
        shown = f"{machine['processor']}, {machine['cores']} cores, `{machine['level']}`, {machine['memory_gib']} GiB"
        return f"`{run['commit'][:10]}`" + (" and more" if run["dirty"] else ""), run["when"], shown
    commit, day, *machine = earlier(name)
    return f"`{commit}` or before", day, machine[0] if machine else "not told"


def kernels(name: str) -> str:
    """The digest of the compiled code, where a record tells it."""
    for each in records(name):
        if found := re.findall(r"lean:(\w{8})", str(each.get("attention", ""))):
            return str(found[0])
    return ""


def note() -> str:
    """Whether all files are of one commit."""
    runs = [run_of(name) for step in STEPS for name in step.files]
    commits = {run["commit"] for run in runs if run}
    if all(runs) and len(commits) == 1:
        return f"All files are of commit `{commits.pop()[:10]}`."
    return (
        "The files were not all made from one commit: [Sources](#sources) says of each from which one. "
        "`make bench-all` makes all of them from one."
    )


BLOCKS = {"sources": sources, "sources-note": note}
