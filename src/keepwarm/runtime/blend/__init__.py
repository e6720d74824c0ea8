"""Content reused away from the prefix: moved and repaired."""
