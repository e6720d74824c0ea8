"""Keepwarm inside other people's loops."""
