"""Callers, and what belongs to them."""
