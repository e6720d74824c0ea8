"""KVBoost's ten experiments on real weights: `keepwarm eval chunks`. One module each; `bench.py` is what they share."""
