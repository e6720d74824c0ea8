"""Where torch lives: loading models, attention, the KV arena, prefill and decode."""
