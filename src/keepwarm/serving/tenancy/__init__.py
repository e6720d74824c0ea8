"""Who asks, and what is theirs."""
