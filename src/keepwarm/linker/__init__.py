"""Link: find what can be reused for one request and write it down as a plan. Moves no tensor."""
