"""Fixtures that run the command as a user does."""

from tests.helpers.cli import cli
from tests.helpers.doctor import look

__all__ = ["cli", "look"]
