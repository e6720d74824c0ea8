"""Pure data and arithmetic of prompt caching: stdlib and numpy, no I/O, no torch."""
