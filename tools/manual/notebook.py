"""The notebook of `examples/`: a page of the manual, and its cells run from top to bottom.

`python -m tools.manual.notebook` runs it, and writes what its cells print into the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "keepwarm.ipynb"
_HEAD = "[The notebook](../../examples/keepwarm.ipynb) can be opened in Jupyter, VS Code and Colab.\n"

Cell = dict[str, Any]


def cells() -> list[Cell]:
    found: list[Cell] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def page() -> str:
    """The notebook in Markdown: what is said, each cell's code, and what it printed."""
    parts = []
    for cell in cells():
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text + "\n")
            continue
        parts.append(f"```python\n{text}\n```\n")
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```\n" for output in cell["outputs"]]
    return "\n".join([parts[0], _HEAD, *parts[1:]])


def run() -> Iterator[tuple[Cell, str]]:
    """Run the cells in one namespace, as a kernel does. Yields each code cell and what it printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
            yield cell, printed.getvalue()


def main() -> None:
    printed = {cell["id"]: text for cell, text in run()}
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if text := printed.get(cell["id"]):
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
