"""Keepwarm's store under llama.cpp's own server: `keepwarm slots` stands in front of a running `llama-server`.

Read `keeper.py` first: it holds what happens to a request. `server.py` speaks the server's API, `table.py` knows which
slot holds what, `slot_file.py` reads and writes the files of slots, `probe.py` asks a server what it saves, and
`proxy.py` is the HTTP application. States are taken apart into tokens as under llama-cpp-python (`llamacpp/form.py`).
"""
