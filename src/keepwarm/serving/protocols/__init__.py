"""The HTTP protocols."""
