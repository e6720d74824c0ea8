"""The catalogue of a folder: which blocks are stored, in which run, and what space is taken."""
