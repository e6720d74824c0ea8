"""What no linter sees: no circle among files, imports for types alone included; no file of more than 400 lines."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp


def test_files_import_each_other_in_one_direction() -> None:
    graph = grimp.build_graph("keepwarm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    root = Path(__file__).parents[1]
    files = [path for folder in ("src", "tests", "benchmarks", "papers") for path in (root / folder).rglob("*.py")]
    assert len(files) > 500
    assert not [path for path in files if len(path.read_text().splitlines()) > 400]
