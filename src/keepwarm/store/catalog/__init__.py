"""The catalogue of a folder: which blocks are stored, in which run, and how much space is taken."""
