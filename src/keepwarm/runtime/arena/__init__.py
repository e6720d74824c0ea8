"""KV of sequences in preallocated memory."""
