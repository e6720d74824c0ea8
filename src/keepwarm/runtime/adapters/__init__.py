"""LoRA adapters beside the weights that they adapt: read, checked, and found by name."""
