"""Runs as bytes: their layout and their files."""
