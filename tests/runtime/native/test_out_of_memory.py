"""Compiled kernels that find no memory: an error in Python, and the process goes on. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.host_memory("the compiled kernels run in host memory")

LIMITED = """
import ctypes, resource
import numpy as np
import torch
from keepwarm.runtime.native.build import CHUNKS, compiled, done

def limited(more=8 << 20):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))

def lifted():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def fails(call):
    limited()
    try:
        call()
    except MemoryError as error:
        assert "compiled kernel" in str(error), error
    else:
        raise AssertionError("there was memory")
    finally:
        lifted()

def no_compiler():
    print("SKIP")
    raise SystemExit
"""

MOVED = """
from keepwarm.runtime.blend.rope import _PLANES
kernels = compiled(CHUNKS) or no_compiler()
planes = np.zeros(1, _PLANES)
def move(dim, rows=0):
    planes["dim"] = dim
    return done(kernels.library.keepwarm_move(ctypes.c_void_p(planes.ctypes.data), ctypes.c_int64(1),
                                              ctypes.c_int64(rows), 4, 2))
assert move(16) == 0
fails(lambda: move(1 << 28))
assert move(16) == 0
"""

WATCHED = """
from keepwarm.runtime.blend.scatter import Watch
def see(total):
    queries, keys = torch.ones(40, 4, 64), torch.ones(2, total, 64, dtype=torch.bfloat16)
    watch = Watch(torch.zeros(1, total), np.arange(total - 40, total))
    return watch.mass, lambda: watch._seen(0, queries, keys, 1.0) or no_compiler()
see(64)[1]()
mass, call = see(1 << 16)
fails(call)
assert not mass.any(), "nothing was added"
call()
assert torch.isclose(mass.sum(), torch.tensor(160.0))
"""

CARRIED = """
from keepwarm.runtime.blend.carry import _Carry
kernels = compiled(CHUNKS) or no_compiler()
carry = _Carry()
def carried(changed):
    carry.changed, carry.dim, carry.itemsize = changed, 64, 4
    return done(kernels.library.keepwarm_carry(ctypes.byref(carry), 2))
assert carried(1) == 0
fails(lambda: carried(1 << 22))
"""

# bfloat16 where the processor does not multiply it: threads widen weights inside the parallel region.
DECODED = """
from keepwarm.runtime.native import build
compiled(build._KERNELS) or no_compiler()
from tests.helpers.lean import Lean
lean = Lean("llama", torch.bfloat16, compiled(build._KERNELS), intermediate_size=1 << 18, vocab_size=64,
            num_hidden_layers=1)
lean.decoder.threads = 2
ids = list(range(3, 43))
lean.run(ids[:4], [], lean.arena())  # threads are there
lean.decoder._scratch = torch.zeros(60 * (1 << 18))
arena = lean.arena()
fails(lambda: lean.run(ids, [], arena))
found = lean.run(ids, [], arena)
assert torch.equal(found, lean.run(ids, [], lean.arena()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [MOVED, WATCHED, CARRIED, DECODED], ids=["move", "see", "carry", "step"])
def test_no_memory_is_an_error(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", LIMITED + code], capture_output=True, text=True)
    if "SKIP" in ran.stdout:
        pytest.skip("no C++ compiler")
    assert ran.returncode == 0, ran.stderr
