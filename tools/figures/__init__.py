"""Fills in figures: every measured number of README.md and the manual comes from a file of benchmarks/results.

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`. `python -m tools.figures` writes the blocks and the
plots anew; tests compare, and want no measured number outside of a block. `not_measured.toml` names numbers that are
limits, defaults or examples.
"""
