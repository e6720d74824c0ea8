"""Programs that end without closing an archive, or right after letting go of it: what was put is stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.remote_archives import PATIENT

from keepwarm.store.archive import Archive
from keepwarm.testing.kv import blocks_of, prompt

PUT = """
import sys
from pathlib import Path
from keepwarm.store.archive import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt
store, remote = sys.argv[1:]
archive = Archive.open(Path(store) if store else None, max_ram=1 << 30, max_disk=1 << 30, remotes=[remote])
archive.put(MemoryKV.random(UNEVEN, 4096), blocks_of(prompt(4096), 64), namespace())
"""


@pytest.mark.parametrize(
    "end", ["", "archive.let_go()", "archive.let_go(); del archive", "archive.let_go(); archive.close()"]
)
@pytest.mark.parametrize("on_disk", [True, False])
def test_what_was_put_is_written_when_the_program_ends(tmp_path: Path, end: str, on_disk: bool) -> None:
    pytest.importorskip("obstore")
    store, remote = tmp_path / "store" if on_disk else None, (tmp_path / "remote").as_uri()
    command = [sys.executable, "-c", PUT + end, str(store or ""), remote]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    ids = [block.exact for block in blocks_of(prompt(4096), 64)]
    for folder, remotes in ((store, []), (None, [remote])):
        if folder or remotes:
            with Archive.open(folder, max_ram=0, max_disk=1 << 30, remotes=remotes, limits=PATIENT) as archive:
                assert len(archive.lookup(ids)) == len(ids)
