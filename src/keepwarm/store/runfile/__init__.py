"""Runs as bytes: their layout, and files of them."""
