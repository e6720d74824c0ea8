"""Contract suites that every tier passes, and the stand-ins they use. Needs pytest; nothing in the package uses it."""
