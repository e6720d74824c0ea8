"""Compile: requests become segments, tokens and cuts; fresh KV becomes stored blocks."""
