"""Parts of `benchmarks/gpu.py`: models, what must be equal, and what is timed."""
