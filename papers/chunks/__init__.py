"""KVBoost's ten experiments on real weights: `python -m papers chunks`. One module each; `bench.py` is shared."""
