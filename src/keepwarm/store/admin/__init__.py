"""Questions that people ask a store, and removals from it."""
