"""`keepwarm demo` and what it asks: 20 tool schemas and a few questions, written for this project."""

from __future__ import annotations
