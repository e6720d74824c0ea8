"""What people ask of a store, and what removes from it."""
