"""All code that uses torch: loading models, attention, the KV arena, prefill and decode."""
