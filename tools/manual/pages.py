"""All pages that are made, by their path in the manual."""

from __future__ import annotations

from collections.abc import Callable

from tools.manual import commands, configuration, http, notebook, python, troubleshooting

PAGES: dict[str, Callable[[], str]] = {
    "quickstart/notebook.md": notebook.page,
    "reference/configuration.md": configuration.page,
    "reference/commands.md": commands.page,
    "reference/http.md": http.page,
    "reference/python.md": python.page,
    "troubleshooting.md": troubleshooting.page,
}
