"""A report as a list of blocks, written as Markdown and as one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    file: str  # beside the report
    caption: str


Block = Heading | Paragraph | Table | Picture

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:14px}"
    "th,td{border:1px solid #ccc;padding:.25rem .6rem;text-align:left;white-space:nowrap}"
    "th{background:#f3f3f3}img{max-width:100%}figcaption,caption{color:#555;font-size:13px;text-align:left}"
)


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}")
            case Paragraph(text):
                parts.append(text)
            case Table(headers, rows, caption):
                lines = [caption, ""] if caption else []
                lines += [_row(headers), "|" + "---|" * len(headers), *(_row(row) for row in rows)]
                parts.append("\n".join(lines))
            case Picture(file, caption):
                parts.append(f"![{caption}]({file})")
    return "\n\n".join(parts) + "\n"


def page(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """The blocks as one HTML file; pictures are read from `folder`."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"<h{level}>{html.escape(text)}</h{level}>")
            case Paragraph(text):
                parts.append(f"<p>{html.escape(text)}</p>")
            case Table(headers, rows, caption):
                head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headers)
                body = "".join(
                    "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
                )
                above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
                parts.append(f"<table>{above}<tr>{head}</tr>{body}</table>")
            case Picture(file, caption):
                data = base64.b64encode((folder / file).read_bytes()).decode()
                words = html.escape(caption)
                parts.append(
                    f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
                    f"<figcaption>{words}</figcaption></figure>"
                )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def write(folder: Path, name: str, title: str, blocks: Sequence[Block]) -> list[Path]:
    """Write `name`.md and `name`.html; returns their paths."""
    whole = [Heading(title, 1), *blocks]
    files = [folder / f"{name}.md", folder / f"{name}.html"]
    files[0].write_text(markdown(whole), encoding="utf-8")
    files[1].write_text(page(title, whole, folder), encoding="utf-8")
    return files


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
