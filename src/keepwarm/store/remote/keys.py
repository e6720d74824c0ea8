"""The keys and sets of a remote service, and what they hold.

layout           what this store is: layout version, id of the encryption key
v1/b/BLOCK       where a block is: its run, its ordinal there, and the runs above (`Whereabouts`)
v1/r/RUN/head    a line about the run (`Mark`), then the run file up to its KV
v1/r/RUN/body    the rest of the run file
v1/p/PREFIX/     set of RUN.ORDINAL: blocks whose left context has this prefix name
v1/t/TAG/        set of runs under a salt
v1/runs/         set of marks: every run that is stored or is being written; its time is the run's last use
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from keepwarm.store.remote.layout import ROOT

RUNS = f"{ROOT}runs"
NAMES = f"{ROOT}names"
PURGES = f"{ROOT}purges"
REPLICAS = f"{ROOT}replicas"


def block(block_id: bytes) -> str:
    return f"{ROOT}b/{block_id.hex()}"


def head(run_id: str) -> str:
    return f"{ROOT}r/{run_id}/head"


def body(run_id: str) -> str:
    return f"{ROOT}r/{run_id}/body"


def children(prefix: bytes) -> str:
    return f"{ROOT}p/{prefix.hex()}"


def tagged(tag: str) -> str:
    return f"{ROOT}t/{tag}"


def named(name: str) -> str:
    return f"{ROOT}n/{safe(name)}"


def safe(name: str) -> str:
    """Encode a name so that every service accepts it as a part of a key."""
    return quote(name, safe="").replace("%", "=").replace(".", "=2E")


def unsafe(text: str) -> str:
    return unquote(text.replace("=", "%"))
