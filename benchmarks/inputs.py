"""What a step's figures depend on. To a step, two commits that differ in nothing of it are the same code."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.plan import Step

NOT_CODE = (
    *("benchmarks/results", "papers/results"),
    *("docs", "*.md", "tools", "deploy", "mkdocs.yml", ".ci", ".github"),
    "pyproject.toml",  # stamps tell the versions that it asks for
)
RUNNER = {f"benchmarks/{name}.py" for name in ("all", "execution", "inputs", "plan")}  # stamps hold the commands
FOLDERS = ("benchmarks", "benchmarks/peers")  # where programs lie, and what they import
APART = {  # folders that few programs use, and the word by which these name them
    "benchmarks/acceptance": "acceptance",
    "papers": "papers",
    "papers/nope*": "nope",
    "src/keepwarm/integrations/llamaserver": "llamaserver",
    "src/keepwarm/runtime/gpu_kernels": "gpu_kernels",
    "src/keepwarm/serving/web": "chromium",
}
PACKAGES = {"vllm"}  # who imports this name means the package, and not the program beside it
_NAMED = re.compile(r"(?:^|[/\s\"\'])(\w+)\.py\b")  # programs run others by their files' names
_TESTED = re.compile(r"\bmake test-(\w+)")  # the folder of tests that a command runs
_IMPORTED = re.compile(r"^\s*(?:from|import) (?:benchmarks\.)?(?:peers\.)?(\w+)", re.MULTILINE)


def not_read_by(step: Step, root: Path) -> tuple[str, ...]:
    """What may differ between two commits that are the same code to a step, as paths that git excludes: documents,
    results, what runs the steps, tests that it does not run (but not tests/helpers, which programs use), and programs
    and folders that its own do not use."""
    run = {name for command in step.commands for name in _TESTED.findall(command)}
    folders = {path.name for path in root.glob("tests/*/")}
    tests = [f"tests/{name}" for name in sorted(folders - run - {"helpers"})]
    programs = {file.relative_to(root).as_posix() for each in FOLDERS for file in (root / each).glob("*.py")}
    used = _used(step, root)
    text = "".join((root / name).read_text(encoding="utf-8") for name in used)
    apart = [folder for folder, word in APART.items() if word not in text]
    others = sorted(programs - used | RUNNER)
    return tuple(f":(exclude){path}" for path in (*NOT_CODE, *tests, "tests/test_*.py", *apart, *others))


def _used(step: Step, root: Path) -> set[str]:
    """The files of a step's programs, and of all that they import or name, one through another. A name that two folders
    have stands for both files."""
    found: set[str] = set()
    left = [module for command in step.commands for module in _NAMED.findall(command)]
    while left:
        module = left.pop()
        for name in (f"{folder}/{module}.py" for folder in FOLDERS):
            if name not in found and (root / name).is_file():
                found.add(name)
                text = (root / name).read_text(encoding="utf-8")
                left += [*(set(_IMPORTED.findall(text)) - PACKAGES), *_NAMED.findall(text)]
    return found
