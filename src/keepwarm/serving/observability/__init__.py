"""Counters, logs, traces, samples."""
