"""A test of exactness over HTTP: does a server answer a prompt alike however it comes to its KV?

`server.py` asks any OpenAI-compatible server, `checks.py` compares what it answers. Neither loads a model.
"""
