"""A process with an engine of its own, which does what `test_purge_stateful` says, and is killed at any moment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.helpers.models import tiny
from tests.helpers.tokenizers import loaded

from keepwarm import Engine
from keepwarm.errors import KeepwarmError, PurgedMeanwhile

MINE, THEIRS = "mine", "theirs"
loaded("smollm2")  # before it is forked off: that is what takes long
torch.set_num_threads(1)


def said(word: str) -> str:
    return f"{word} " * 60


class Doing:
    """What the process can be asked for. Everything it says, stores or learns is made of one word."""

    def __init__(self, folder: Path, family: str) -> None:
        self.engine = Engine.from_pretrained(
            (tiny(family), loaded("smollm2")),
            store=folder / "store",
            step=64,
            min_step=8,
            settle_after=None,
            chunk_contexts="any",
        )
        self.folder = folder
        self.open: list[Any] = []

    def begin(self, word: str, session: bool) -> None:
        more = {"session": "s"} if session else {}
        self.open.append(self.engine.stream(said(word), salt=MINE, max_new_tokens=3, **more))
        next(self.open[-1])

    def finish(self) -> None:
        """Every stream that is open."""
        while self.open:
            list(self.open.pop(0))
        self.engine.sessions.settle()
        self.engine.pipeline.chunks.wait_until_idle(60)
        self.engine.flush()

    def turn(self, word: str) -> None:
        with suppress(PurgedMeanwhile):
            self.engine.generate(said(word), salt=MINE, session="s", max_new_tokens=2)

    def learn(self, word: str) -> None:
        documents = [said(word), "Another one. " * 20]
        question = [{"role": "user", "content": "?"}]
        arguments = {"messages": question, "documents": documents, "salt": MINE, "max_new_tokens": 1}
        self.engine.generate(**arguments, reuse="chunks")

    def register(self, word: str, damaged: bool) -> None:
        found = self.engine.tools([], system=said(word), name=word, salt=MINE)
        if damaged:
            for path in (self.folder / "store" / "toolsets").glob("*.json"):
                path.write_bytes(path.read_bytes()[:-3])
            self.engine.tool_sets.registry.versions(found.name, MINE)  # sets it aside

    def export(self, word: str) -> None:
        """A tenant's prompt is not exported, and leaves nothing where it was tried."""
        self.engine.warm(said(word), salt=MINE, name=word)
        self.engine.flush()
        with suppress(KeepwarmError):
            self.engine.pipeline.archive.contents.export(word, self.folder / "store" / "bundle")

    def other(self) -> None:
        self.engine.generate("Somebody else's question. " * 10, salt=THEIRS, session="s", max_new_tokens=2)

    def purge(self, dies: bool) -> None:
        if dies:
            self.engine.pipeline.on_purge.append(die)
        self.engine.purge(MINE)

    def comes_back(self, word: str) -> list[str]:
        """What is still met of a word."""
        found = []
        if any(self._met(word, chat) > self._met("xylophone", chat) for chat in (False, True)):
            found.append("KV")
        if any(word in str(self.engine.sessions.show(each.name, MINE)) for each in self.engine.sessions.list(MINE)):
            found.append("a session")
        if word in str(self.engine.tool_sets.names(MINE)):
            found.append("a set")
        return found

    def _met(self, word: str, chat: bool) -> int:
        """Tokens that are reused of a prompt, or of a conversation, whose header other words have, too."""
        prompt: Any = {"messages": [{"role": "user", "content": said(word)}]} if chat else {"prompt": said(word)}
        return self.engine.explain(**prompt, salt=MINE).cached_tokens


def die(_: frozenset[bytes] = frozenset()) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(pipe: Connection, folder: Path, family: str) -> None:
    """Answer requests `(what, arguments, then_die)` until the pipe ends."""
    doing = Doing(folder, family)
    pipe.send(None)
    while True:
        try:
            what, arguments, dies = pipe.recv()
        except EOFError:
            die()
        found = getattr(doing, what)(*arguments)
        if dies:
            die()  # with what the writer is at
        pipe.send(found)
