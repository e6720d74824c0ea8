"""The path of a request through one model and its cache: compile, link, execute, emit."""
