"""`keepwarm doctor`: looks at everything that a first run needs, and says what to do about what is wrong."""
