"""Messages that note how far ahead a chat template looks, so that one rendering shows where each message ends.

A template writes while it goes through the messages. When it goes on to the next one without having looked ahead, every
prompt that begins with the same messages begins with the text written so far. Nothing that follows, such as a user's
text, can move that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from keepwarm.models.base import Message


class Watch:
    """One rendering: what was written so far, and how many of the messages the template can know of by then."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.ends: list[int | None] = [None] * len(messages)  # characters at which each has ended; None: not known
        self.written = 0  # characters
        self.rounds = 0  # finished rounds of the template's outer loops
        self._known = 0

    def look(self, count: int) -> None:
        """Note that the template learns the first `count` messages, or that there are that many."""
        self._known = max(self._known, count)

    def look_at_all(self) -> None:
        """Note that the template learns how many messages there are."""
        self._known = len(self.messages) + 1

    def passed(self, index: int) -> None:
        """Note that the template has gone through everything up to this message."""
        self.ends[index] = self.written if self._known <= index + 1 else None


class WatchedMessages(Sequence[Message]):
    """Stands for the list of messages in a template, from message `first` on."""

    def __init__(self, watch: Watch, first: int = 0) -> None:
        self._watch = watch
        self._first = first

    def _all(self) -> list[Message]:
        self._watch.look_at_all()
        return self._watch.messages[self._first :]

    def __iter__(self) -> Iterator[Message]:
        watch, began = self._watch, self._watch.rounds
        for index in range(self._first, len(watch.messages) + 1):
            # a loop that asks for the next message early (`loop.last`) has not gone through the present one
            if index > self._first and watch.rounds - began == index - self._first:
                watch.passed(index - 1)
            watch.look(index + 1)
            if index < len(watch.messages):
                yield watch.messages[index]

    @overload
    def __getitem__(self, key: int) -> Message: ...

    @overload
    def __getitem__(self, key: slice) -> Sequence[Message]: ...

    def __getitem__(self, key: int | slice) -> Message | Sequence[Message]:
        if isinstance(key, int):
            if key < 0:
                return self._all()[key]
            self._watch.look(self._first + key + 1)
            return self._watch.messages[self._first + key]
        if key.stop is None and key.step in (None, 1) and isinstance(key.start, int) and key.start >= 0:
            return WatchedMessages(self._watch, self._first + key.start)
        return self._all()[key]

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        self._watch.look(self._first + 1)
        return len(self._watch.messages) > self._first

    def __eq__(self, other: object) -> bool:
        return self._all() == (list(other) if isinstance(other, WatchedMessages) else other)

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Any) -> list[Message]:
        return self._all() + list(other)

    def __radd__(self, other: Any) -> list[Message]:
        return list(other) + self._all()

    def __repr__(self) -> str:
        return repr(self._all())
