"""What one model family knows: its tokenizer, its chat template, and where a prompt may be cut."""
