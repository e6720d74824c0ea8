"""The sessions of one engine.

A request with `session=` brings the whole conversation (`messages=`, as clients of chat APIs send it) or, as its
prompt, only what the user says next. Either way the conversation is found in the session's tree and continued there,
and its answer is recorded with the generated ids. A conversation that differs from the recorded one begins a branch at
the first difference; nothing recorded is ever changed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.config import Reuse, store_key
from keepwarm.core.identity import salt_tag, same_json
from keepwarm.core.results import Explanation, Generation, Piece
from keepwarm.core.texts import StoredText
from keepwarm.errors import ConfigError, StoreError
from keepwarm.linker.text import grown
from keepwarm.models.messages import plain
from keepwarm.pipeline.explaining import explain
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.sessions.kept import KeptAnswers
from keepwarm.sessions.records import Node, Records, SessionRow
from keepwarm.sessions.settling import GoOn, Settler, replay
from keepwarm.sessions.turn import Turn, follow, marked, ran_record, read_ran, shared
from keepwarm.sessions.views import SessionInfo, SessionView
from keepwarm.store.runfile.crypto import StoreKey

log = logging.getLogger(__name__)

Nodes = list[Node]
Messages = list[dict[str, Any]]

_EXPIRE_EVERY = 60.0  # seconds, at most, between two searches for expired sessions
_PATHS = 32  # conversations kept in memory; the others are read again
_SETTINGS = ("tools", "found_tools", "documents", "tool_order", "template_args", "public_header", "adapter")


class Sessions:
    """Sessions by name. With a store they outlive the process. Each salt has its own names."""

    def __init__(self, pipeline: Pipeline) -> None:
        secret = store_key(pipeline.config.store_key_file) if pipeline.config.store is not None else None
        self.pipeline = pipeline
        key = None if secret is None else StoreKey(secret)
        self.records = Records(pipeline.config.store, key, pipeline.archive.epochs, pipeline.archive.room)
        self.answers = KeptAnswers(self.records)
        self._paths: OrderedDict[bytes, tuple[Node, ...]] = OrderedDict()
        self._salts: dict[bytes, str | None] = {}  # of sessions waiting to be settled; salts are never stored
        self._lock = threading.Lock()
        self._settler = Settler(pipeline, self._settle, pipeline.config.settle_after)
        self._looked = -math.inf
        self._expire_old()
        pipeline.on_purge.append(self.forget)
        pipeline.on_close.append(self.close)

    # ---- talking ----

    def open(
        self,
        name: str,
        *,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        salt: str | None = None,
    ) -> Session:
        """Open a session. A new one begins with the arguments; an existing one keeps what it has.

        Raises ConfigError when the system prompt, tools or documents differ from those of an existing session.
        """
        epoch = self.pipeline.archive.epoch()
        key, row = self._find(name, salt)
        given = {"tools": list(tools) if tools else None, "documents": list(documents) if documents else None}
        if row is None:
            first = [] if system is None else [self.records.node(self.records.root(salt), {"message": _system(system)})]
            head = first[-1].id if first else self.records.root(salt)
            self.records.save(key, salt, head, first, {"name": name, **given}, epoch)
            return Session(self, name, salt)
        path = self._path(row.head)
        there = path[0].message["content"] if path and path[0].message["role"] == "system" else None
        if system is not None and system != there:
            raise ConfigError(f"session {name!r} has another system prompt: fork it, edit its message 0, or drop it")
        for setting, value in given.items():
            if value is not None and not same_json(value, row.record.get(setting)):
                raise ConfigError(f"session {name!r} has other {setting}: drop it, or use another name")
        return Session(self, name, salt)

    def say(self, name: str, text: str, **arguments: Any) -> Generation:
        """Say the next thing in a session; for other arguments see `Engine.generate`."""
        return self.pipeline.generate(text, session=name, **arguments)

    def regenerate(self, name: str, *, salt: str | None = None, **arguments: Any) -> Generation:
        """Answer the last user message (again); an earlier answer stays on its own branch."""
        return self.pipeline.generate(**self.again(name, salt=salt, **arguments))

    def again(self, name: str, *, salt: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Return arguments of `Engine.generate` that answer the last user message of a session (again)."""
        row = self._row(name, salt)
        chat = [node.message for node in self._path(row.head)]
        while chat and chat[-1]["role"] == "assistant":
            chat.pop()
        if not chat or chat[-1]["role"] == "system":
            raise ConfigError(f"nothing was said in session {name!r} yet")
        kept = {name: row.record[name] for name in _SETTINGS if row.record.get(name)}
        return kept | arguments | {"messages": chat, "session": name, "salt": salt}

    # ---- looking ----

    def list(self, salt: str | None = None) -> tuple[SessionInfo, ...]:
        """Return the sessions under a salt (None: under none), the last used first."""
        return tuple(_info(row) for row in self.records.sessions(salt))

    def show(self, name: str, salt: str | None = None) -> SessionView:
        """Return a session's messages and branches. Raises ConfigError if it is unknown, CorruptRun if damaged."""
        row = self._row(name, salt)
        path = self._path(row.head)
        branches = shared([self._path(tip) for tip in self.records.tips(row.key)], path)
        waits = bool(path) and path[-1].message["role"] not in ("assistant", "system")
        return SessionView(_info(row), tuple(node.message for node in path), branches, waits)

    def explain(self, name: str, text: str | None = None, *, salt: str | None = None) -> Explanation:
        """Explain what the session's next turn would reuse if the user says `text` next. Runs nothing."""
        return explain(self.pipeline, text if text is not None else ".", {"session": name, "salt": salt})

    # ---- changing ----

    def fork(self, name: str, new: str, *, at: int | None = None, salt: str | None = None) -> Session:
        """Make a new session that begins with the first `at` messages of another (None: all). No KV is copied: the
        common beginning has the same names in both."""
        epoch = self.pipeline.archive.epoch()
        row = self._row(name, salt)
        key, there = self._find(new, salt)
        if there is not None:
            raise ConfigError(f"there is a session {new!r} already: drop it, or choose another name")
        path = self._path(row.head)
        at = len(path) if at is None else at
        if not 0 <= at <= len(path):
            raise ConfigError(f"session {name!r} has {len(path)} messages: at must lie between 0 and that, got {at}")
        head = path[at - 1].id if at else self.records.root(salt)
        self.records.save(key, salt, head, (), row.record | {"name": new}, epoch)
        return Session(self, new, salt)

    def edit(self, name: str, at: int, content: str, *, salt: str | None = None) -> Session:
        """Change message `at` (negative: from the end) on a new branch that ends with it. `regenerate` answers it."""
        epoch = self.pipeline.archive.epoch()
        row = self._row(name, salt)
        path = self._path(row.head)
        if not -len(path) <= at < len(path):
            raise ConfigError(f"session {name!r} has {len(path)} messages, none is number {at}")
        old = path[at]
        node = self.records.node(old.parent, {"message": old.message | {"content": content}})
        self.records.save(row.key, salt, node.id, [node], row.record, epoch)
        return Session(self, name, salt)

    def drop(self, name: str, *, salt: str | None = None) -> bool:
        """Forget a session. Return whether there was one. Its KV stays in the store until it is evicted."""
        return self.records.drop([self.records.session_key(name, salt)]) > 0

    def expire(self, seconds: float) -> int:
        """Drop all sessions that have been unused for longer than `seconds`. Return how many."""
        return self.records.drop(self.records.expired(seconds))

    def forget(self, tags: Collection[bytes]) -> None:
        """Forget what this process has in memory, after a purge of salts."""
        if not tags:
            return
        with self._lock:
            self._paths.clear()
        self.records.purged(tags)

    def _expire_old(self) -> None:
        """Drop sessions unused for `session_ttl`, from time to time. A failure is only logged; the turn continues."""
        ttl = self.pipeline.config.session_ttl
        if ttl is None or time.monotonic() - self._looked < min(ttl, _EXPIRE_EVERY):
            return
        self._looked = time.monotonic()
        try:
            self.expire(ttl)
        except StoreError as error:
            log.warning("old sessions could not be dropped: %s", error)

    # ---- settling ----

    def settle(self, name: str | None = None, *, salt: str | None = None) -> int:
        """Store the KV of whole conversations now: of one session, or of all that wait. Return how many sessions."""
        if name is None:
            return self._settler.settle_all()
        epoch = self.pipeline.archive.epoch()
        self._settle_row(self._row(name, salt), salt, lambda: True, epoch)
        return 1

    def waiting(self) -> int:
        """How many sessions wait to be settled."""
        return len(self._settler.waiting())

    def close(self, until: float = math.inf) -> bool:
        """Settle waiting sessions (unless `settle_after` is None) and close the file. Return False when some were not
        settled by the time `until` (`time.monotonic`)."""
        done = self._settler.close(until)
        self.records.close()
        return done

    def _settle(self, key: bytes, go_on: GoOn) -> bool:
        epoch = self.pipeline.archive.epoch()  # taken before the session is read, so that a later purge is noticed
        row = self.records.session(key)
        return row is None or self._settle_row(row, self._salts.get(key), go_on, epoch)

    def _settle_row(self, row: SessionRow, salt: str | None, go_on: GoOn, epoch: int) -> bool:
        path = self._path(row.head)
        if not path:
            return True
        arguments = {name: row.record[name] for name in _SETTINGS if row.record.get(name)}
        arguments |= {"messages": marked([node.message for node in path]), "salt": salt, "ran": self._ran(path)}
        compiled = self.pipeline.prompts.compiled(None, arguments)
        if self.pipeline.config.reuse is Reuse.OFF or self.pipeline.uncached_reason(len(compiled.tokens)):
            return True
        tags = [salt_tag(key) for key in compiled.extra_keys.values()]
        if not replay(self.pipeline, compiled, epoch, lambda: self.pipeline.archive.allows(epoch, tags) and go_on()):
            return False
        self.records.settled(row.key, row.head)
        return True

    # ---- a turn ----

    def begin(self, prompt: Any, arguments: Mapping[str, Any], epoch: int) -> Turn:
        """Return the turn of a request with `session`, which began at this `epoch` of the store. Raises ConfigError
        and PromptError."""
        self._expire_old()
        given = dict(arguments)
        name, salt = given.pop("session"), given.get("salt")
        if not isinstance(name, str) or not name or len(name) > 1000:
            raise ConfigError(f"session must be a name of 1 to 1000 characters, got {name!r}")
        if given.get("segments") is not None or given.get("ran") is not None:
            raise ConfigError("a session takes messages=, or as its prompt what the user says next")
        if (prompt is None) == (given.get("messages") is None):
            raise ConfigError(
                "a session takes messages= (the whole conversation) or a prompt (what the user says next)"
            )
        key, record = self.records.session_key(name, salt), {"name": name}
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ConfigError("in a session the prompt is a text: what the user says next")
            row = self.records.session(key)
            base = list(self._path(row.head)) if row is not None else []
            if base and base[-1].message["role"] not in ("assistant", "system"):
                raise ConfigError(f"session {name!r} waits for an answer: regenerate() gives it")
            chat = [*(node.message for node in base), {"role": "user", "content": prompt}]
            declared = set[int]()
            if row is not None:
                given = {n: row.record[n] for n in _SETTINGS if row.record.get(n)} | given
        else:
            chat, declared = plain(given["messages"])
            base = self._recorded(name, key, salt, chat)
        record |= {n: given[n] for n in _SETTINGS if given.get(n)}
        given |= {"messages": marked(chat, declared), "ran": self._ran(base)}
        stores = given.get("reuse") != Reuse.OFF and not (
            given.get("reuse") is None and self.pipeline.config.reuse is Reuse.OFF
        )
        return Turn(key, salt, tuple(base), tuple(chat[len(base) :]), given, record, stores, epoch)

    def _recorded(self, name: str, key: bytes, salt: str | None, chat: Messages) -> Nodes:
        """Return the recorded messages of a whole conversation. If the record is damaged there are none: the request
        brings all that it needs."""
        try:
            row = self.records.session(key)
            path = self._path(row.head) if row is not None else ()
            return follow(chat, path, self.records.children, self.records.root(salt))
        except StoreError as error:
            log.warning("session %r cannot be read and begins anew: %s", name, error)
            return []

    def finish(self, turn: Turn, compiled: CompiledPrompt, result: Generation) -> None:
        """Record what was said and the answer. An error is only logged: the caller has the answer."""
        try:
            self._finish(turn, compiled, result)
        except Exception as error:
            log.warning("a turn of session %r could not be recorded: %s", turn.record["name"], error)

    def _finish(self, turn: Turn, compiled: CompiledPrompt, result: Generation) -> None:
        records, parent = self.records, turn.base[-1].id if turn.base else self.records.root(turn.salt)
        nodes: Nodes = []
        for message in turn.new:
            nodes.append(records.node(parent, {"message": message}))
            parent = nodes[-1].id
        answer: dict[str, Any] = {
            "message": {"role": "assistant", "content": result.text},
            "generated": list(result.token_ids),
            "finish": result.finish_reason,
            "model": self.pipeline.model.identity.digest.hex(),
        }
        if self.pipeline.config.session_tokens == "as_generated" and compiled.source is not None:
            ran = grown(compiled.source, result.token_ids, self.pipeline.tokenizer)
            answer["ran"] = ran_record(self.pipeline.model.identity.tokenizer, ran, turn.base)
        nodes.append(records.node(parent, answer))
        tokens = result.prompt_tokens + len(result.token_ids)
        told = turn.record | {"tokens": tokens}
        records.save(turn.key, turn.salt, nodes[-1].id, nodes, told, turn.epoch, turns=1)
        self._remember(nodes[-1].id, (*turn.base, *nodes))
        if not turn.stores or result.uncached_reason:
            return
        if self.pipeline.grid.inside:  # decoded tokens are as exact as prefilled ones, and stored already
            records.settled(turn.key, nodes[-1].id)
        else:
            self._salts[turn.key] = turn.salt
            self._settler.add(turn.key)

    def _ran(self, path: Sequence[Node]) -> StoredText | None:
        """Return the text of a conversation as far as it was run with this tokenizer, if ids are kept as generated."""
        if self.pipeline.config.session_tokens != "as_generated":
            return None
        tokenizer = self.pipeline.model.identity.tokenizer
        found = (read_ran(tokenizer, node, path) for node in reversed(path) if "ran" in node.record)
        return next((ran for ran in found if ran is not None), None)

    # ---- finding ----

    def _find(self, name: str, salt: str | None) -> tuple[bytes, SessionRow | None]:
        key = self.records.session_key(name, salt)
        return key, self.records.session(key)

    def _row(self, name: str, salt: str | None) -> SessionRow:
        row = self._find(name, salt)[1]
        if row is None:
            known = ", ".join(repr(info.name) for info in self.list(salt)[:10]) or "none"
            raise ConfigError(f"there is no session {name!r}; there are: {known}")
        return row

    def _path(self, head: bytes) -> tuple[Node, ...]:
        with self._lock:
            found = self._paths.get(head)
            if found is not None:
                self._paths.move_to_end(head)
                return found
        found = self.records.path(head)
        self._remember(head, found)
        return found

    def _remember(self, head: bytes, path: tuple[Node, ...]) -> None:
        with self._lock:
            self._paths[head] = path
            while len(self._paths) > _PATHS:
                self._paths.popitem(last=False)


class Session:
    """One session of an engine, for talking."""

    def __init__(self, sessions: Sessions, name: str, salt: str | None = None) -> None:
        self.sessions, self.name, self.salt = sessions, name, salt

    def say(self, text: str, **arguments: Any) -> Generation:
        """Say the next thing; for other arguments see `Engine.generate`."""
        return self.sessions.pipeline.generate(text, session=self.name, salt=self.salt, **arguments)

    def stream(self, text: str, **arguments: Any) -> Iterator[Piece]:
        """Say the next thing and yield the answer piece by piece."""
        return self.sessions.pipeline.stream(text, session=self.name, salt=self.salt, **arguments)

    def regenerate(self, **arguments: Any) -> Generation:
        return self.sessions.regenerate(self.name, salt=self.salt, **arguments)

    def edit(self, at: int, content: str) -> Session:
        return self.sessions.edit(self.name, at, content, salt=self.salt)

    def fork(self, new: str, *, at: int | None = None) -> Session:
        return self.sessions.fork(self.name, new, at=at, salt=self.salt)

    def show(self) -> SessionView:
        return self.sessions.show(self.name, self.salt)

    def explain(self, text: str | None = None) -> Explanation:
        return self.sessions.explain(self.name, text, salt=self.salt)

    def settle(self) -> int:
        return self.sessions.settle(self.name, salt=self.salt)

    def drop(self) -> bool:
        return self.sessions.drop(self.name, salt=self.salt)


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _info(row: SessionRow) -> SessionInfo:
    return SessionInfo(
        row.name, row.turns, int(row.record.get("tokens", 0)), row.settled == row.head, row.created, row.used
    )
