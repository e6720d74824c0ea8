"""Models of which vLLM keeps several groups of pages: full attention, sliding windows, recurrent states.

`groups.py` says what each group needs to go on from a position, `naming.py` what its blocks are called, `scheduler.py`
finds and plans, `worker.py` moves. A load is one that no step waits for, as vLLM takes failures of these models only
then.
"""
