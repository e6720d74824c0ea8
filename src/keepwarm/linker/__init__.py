"""Link: find what one request can reuse, and write it down as a plan. Moves no tensor."""
