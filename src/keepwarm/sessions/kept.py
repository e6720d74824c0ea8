"""Keeps answers that clients name by an id and continue: in the sessions' database, under the same rules.

Each answer has a row of its own, so it can be removed without the others. Its items are a path in the tree of messages.
Answers that continue each other share the items that they have in common.
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
    """One kept answer."""

    items: tuple[Item, ...]  # those of the whole conversation; its own output comes last
    inputs: int  # how many of them come before its output
    body: dict[str, Any]  # the other fields of the response

    @property
    def output(self) -> tuple[Item, ...]:
        """The items of the answer itself."""
        return self.items[self.inputs :]


class KeptAnswers:
    """Kept answers by their ids. Each salt has its own ids. Threads and processes may share the records."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def get(self, name: str, salt: str | None, seconds: float) -> Kept | None:
        """Return an answer. Return None if it is not there, or was kept for longer than `seconds`. Raises
        StoreError."""
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
        """Keep an answer (see `Kept`) whose request began at this epoch of the store. Then remove the oldest answers
        under this salt beyond `most`, and those that were kept for longer than `seconds`. Raises StoreError."""
        nodes: list[Node] = []
        parent = self._records.answer_root(salt)
        for message in (*items, {"inputs": inputs, "body": dict(body)}):
            nodes.append(self._records.node(parent, {"message": message}))
            parent = nodes[-1].id
        self._records.save(self._records.answer_key(name, salt), salt, parent, nodes, {"name": name}, epoch)
        self._records.drop(self._records.old_answers(salt, most, seconds))

    def drop(self, name: str, salt: str | None) -> bool:
        """Forget an answer. Return whether there was one. Its KV stays for others until the store evicts it."""
        return self._records.drop([self._records.answer_key(name, salt)]) > 0
