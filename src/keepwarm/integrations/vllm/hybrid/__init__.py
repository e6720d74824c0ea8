"""Models with several groups of pages in vLLM: full attention, sliding windows, recurrent states.

`groups.py` says what each group needs to continue from a position, `naming.py` how its blocks are named, `scheduler.py`
finds and plans, `worker.py` moves. No step waits for a load, as vLLM handles failures for these models only then.
"""
