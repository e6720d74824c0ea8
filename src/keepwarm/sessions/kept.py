"""Answers that a client names by an id and goes on from: kept in the sessions' database, under the same rules.

Each is a row of its own, so one goes without the others. Its items are a path in the tree of messages, and answers
that go on from one another share what they have in common.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.sessions.records import Node, Records

Item = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """One answer that is kept."""

    items: tuple[Item, ...]  # of the whole conversation, its own output last
    inputs: int  # how many of them come before its output
    body: dict[str, Any]  # what else is to be told of it

    @property
    def output(self) -> tuple[Item, ...]:
        """What the answer itself said."""
        return self.items[self.inputs :]


class KeptAnswers:
    """By id; under a salt, an id is the salt's own. Threads and processes may share the records."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def get(self, name: str, salt: str | None, seconds: float) -> Kept | None:
        """None for one that is not there, or was kept longer than so. Raises StoreError."""
        row = self._records.session(self._records.answer_key(name, salt))
        if row is None or row.created < time.time() - seconds:
            return None
        *path, last = self._records.path(row.head)
        return Kept(tuple(node.message for node in path), int(last.message["inputs"]), last.message["body"])

    def put(
        self,
        name: str,
        salt: str | None,
        *,
        items: Sequence[Item],
        inputs: int,
        body: Mapping[str, Any],
        epoch: int,
        most: int,
        seconds: float,
    ) -> None:
        """Keep an answer (see `Kept`) for what began at an epoch of the store. Of this salt's, the oldest beyond `most`
        go, and those that were kept for so long. Raises StoreError."""
        nodes: list[Node] = []
        parent = self._records.answer_root(salt)
        for message in (*items, {"inputs": inputs, "body": dict(body)}):
            nodes.append(self._records.node(parent, {"message": message}))
            parent = nodes[-1].id
        self._records.save(self._records.answer_key(name, salt), salt, parent, nodes, {"name": name}, epoch)
        self._records.drop(self._records.old_answers(salt, most, seconds))

    def drop(self, name: str, salt: str | None) -> bool:
        """Forget one; whether there was one. Its KV stays for others until the store gives it up."""
        return self._records.drop([self._records.answer_key(name, salt)]) > 0
