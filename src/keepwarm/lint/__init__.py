"""What a request log would gain from prompt caching, and what stands in its way. Runs no model and loads no torch.

`read_log` → `prompt_of` → `lint`: a log's requests become prompts (parts in the vendor's order), which are replayed
under the vendor's published rules as they are, and with each edit that would let more of them be reused.
"""
