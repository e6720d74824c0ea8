"""Keepwarm inside other inference engines and libraries."""
