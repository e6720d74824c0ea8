"""Two processes, each killed at any moment: after a purge nothing of the tenant is in the folder, or comes back."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.helpers.tokenizers import loaded

from keepwarm.core.blocks import token_ids
from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.store import Archive

pytestmark = pytest.mark.slow

WORDS = ["marmalade", "harbour", "lighthouse", "password", "zebra", "quicksand", "violin", "umbrella"]  # one a purge
processes = st.integers(0, 1)
spawning = multiprocessing.get_context("forkserver")
spawning.set_forkserver_preload(["tests.helpers.purge_process"])


class Process:
    def __init__(self, folder: Path, family: str) -> None:
        from tests.helpers.purge_process import run

        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=run, args=(theirs, folder, family), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def do(self, what: str, *arguments: Any, dies: bool = False) -> Any:
        """Raises EOFError when it was killed over it."""
        self._pipe.send((what, arguments, dies))
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Purges(RuleBasedStateMachine):
    @initialize(family=st.sampled_from(["llama", "gpt2"]))
    def begin(self, family: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="keepwarm-purges-"))
        self.family, self.purges = family, 0
        self.there: list[Process | None] = [None, None]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for process in filter(None, self.there):
                process.do("finish")
            self.check()
            for process in filter(None, self.there):
                process.kill()
            shutil.rmtree(self.folder)

    def do(self, at: int, what: str, *arguments: Any, dies: bool = False) -> None:
        process = self.there[at] or Process(self.folder, self.family)
        self.there[at] = process
        try:
            process.do(what, *arguments, dies=dies)
        except (EOFError, ConnectionResetError):
            process.kill()
            self.there[at] = None

    @property
    def word(self) -> str:
        return WORDS[self.purges]

    # ---- what processes do ----

    @rule(at=processes, session=st.booleans(), dies=st.booleans())
    def ask(self, at: int, session: bool, dies: bool) -> None:
        self.do(at, "begin", self.word, session, dies=dies)

    @rule(at=processes, dies=st.booleans())
    def finish(self, at: int, dies: bool) -> None:
        self.do(at, "finish", dies=dies)

    @rule(at=processes, what=st.sampled_from(["turn", "learn", "export"]), dies=st.booleans())
    def do_more(self, at: int, what: str, dies: bool) -> None:
        self.do(at, what, self.word, dies=dies)

    @rule(at=processes, damaged=st.booleans())
    def register(self, at: int, damaged: bool) -> None:
        self.do(at, "register", self.word, damaged)

    @rule(at=processes)
    def other(self, at: int) -> None:
        self.do(at, "other")

    @precondition(lambda self: self.purges + 1 < len(WORDS))
    @rule(at=processes, dies=st.booleans())
    def purge(self, at: int, dies: bool) -> None:
        self.do(at, "purge", dies)
        if dies:
            self.do(1 - at, "purge", False)
        self.purges += 1

    @precondition(lambda self: self.purges)
    @rule()
    def finish_all(self) -> None:
        for at in (0, 1):
            self.do(at, "finish")
        self.check()

    # ---- what must hold ----

    def check(self) -> None:
        """Nothing is under way."""
        for word in WORDS[: self.purges]:
            assert traces(self.folder, word) == []
            for process in filter(None, self.there):
                assert process.do("comes_back", word) == []


def traces(folder: Path, word: str) -> list[str]:
    """Files with a word in them, or its token ids."""
    ids = token_ids(loaded("smollm2")(f"{word} " * 60, add_special_tokens=False)["input_ids"])
    needles = [word.encode(), ids[4:24].tobytes()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [f"{path.name}: {n!r}" for path in files for n in needles if n in path.read_bytes() + path.name.encode()]


TestPurges = pytest.mark.slow(Purges.TestCase)
TestPurges.settings = settings(
    max_examples=4,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking would take minutes
)


def test_traces_and_kv_are_found_where_there_was_no_purge(tmp_path: Path) -> None:
    """Else the test above would see nothing."""
    process = Process(tmp_path, "llama")
    for what in ("begin", "register"):
        process.do(what, "marmalade", False)
    process.do("turn", "marmalade")
    process.do("finish")
    found = "".join(traces(tmp_path, "marmalade"))
    assert process.do("comes_back", "marmalade") == ["KV", "a session", "a set"]
    process.do("purge", False)
    assert process.do("comes_back", "marmalade") == []
    process.kill()
    assert ".safetensors" in found
    assert "sessions.sqlite" in found
    assert traces(tmp_path, "marmalade") == []
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=1 << 30) as archive:
        assert all(salt_tag(salt_key("mine")) not in node.salts for node in archive.contents.tree())
