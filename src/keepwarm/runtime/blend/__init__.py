"""Reuse of content that is not a prefix: its KV is moved and repaired."""
