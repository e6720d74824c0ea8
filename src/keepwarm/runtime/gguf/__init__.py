"""GGUF files: what they say, and how they become models."""
