"""The fixture that runs the command as a user does."""

from tests.helpers.cli import cli

__all__ = ["cli"]
