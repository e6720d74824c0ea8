"""What `mkdocs build` asks while it builds: the pages that are made, and links that lead out of `docs/`."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tools.manual.pages import PAGES

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()((?:\.\./)[^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files of the repository that are no pages lead to where the repository is shown.

    Raises FileNotFoundError for a link to nothing.
    """
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def led(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[2]))
        if target == "docs" or target.startswith("docs/"):
            return found[0]
        if not (_ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}, which is not there")
        kind = "tree" if (_ROOT / target).is_dir() else "blob"
        return f"{found[1]}{config.repo_url.rstrip('/')}/{kind}/main/{target}{found[3]}"

    return _LINK.sub(led, markdown)
