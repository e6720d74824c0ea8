"""The `keepwarm` command. Importing it, and the commands that need no model, load no torch."""

from __future__ import annotations

from keepwarm.cli.app import main

__all__ = ["main"]
