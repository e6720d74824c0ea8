"""What no linter sees: no circle among files, imports for types alone included; no file of more than 400 lines; no test
that imports another test."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
CODE = (".py", ".cpp", ".h", ".js", ".css", ".html")


def test_files_import_each_other_in_one_direction() -> None:
    graph = grimp.build_graph("keepwarm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    folders = ("src/keepwarm", "tests", "benchmarks", "papers", "examples", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    assert len(files) > 700
    assert not [path for path in files if len(path.read_text().splitlines()) > 400]


def test_no_test_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not [name for name in modules if name.split(".")[-1].startswith("test_")], path
