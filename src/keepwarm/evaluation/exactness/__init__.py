"""A test of exactness over HTTP. It checks whether a server gives a prompt the same answer no matter how it got its KV.

`server.py` asks any OpenAI-compatible server, and `checks.py` compares its answers. Neither loads a model.
"""
