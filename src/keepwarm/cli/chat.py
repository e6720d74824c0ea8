"""`keepwarm chat`: a conversation in the terminal that is still there tomorrow, and what each turn cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.explain import ended, print_explanation
from keepwarm.cli.generate import drafted
from keepwarm.cli.options import EngineOptions, Json, MaxNewTokens, grouped, open_engine
from keepwarm.cli.request import refuse_call
from keepwarm.errors import ConfigError, KeepwarmError, TemplateError

if TYPE_CHECKING:
    from keepwarm.core.results import Generation, Piece
    from keepwarm.engine import Engine
    from keepwarm.sessions import Session

HELP = """\
/again          answer the last message again; the old answer stays on a branch
/edit TEXT      say the last message otherwise, and answer it; /edit @N TEXT: message N
/fork NAME [N]  go on in a new session that begins with this one, or with its first N messages
/why [TEXT]     what the next turn would reuse, and where and why that ends
/show           this session's messages and branches
/sessions       all sessions
/open NAME      go on in another session, or begin one
/drop [NAME]    forget a session (this one)
/help           this
/quit           end; the session stays"""


@grouped
def chat(
    engine: EngineOptions,
    session: Annotated[
        str, typer.Option("--session", "-s", help="Name of the session to go on with, or begin.")
    ] = "chat",
    system: Annotated[str | None, typer.Option("--system", help="System prompt of a new session.")] = None,
    salt: Annotated[str | None, typer.Option("--salt", help="Keeps its KV and its sessions apart.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Talk with a model; the session and its KV survive. Lines from standard input do as well as a terminal.

    Each turn shows how many tokens were cached and the time to the first token. /help lists what else can be typed.
    With --json one object is printed per line.
    """
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    refuse_call(sampling)
    with open_engine(engine.source, engine.settings()) as loaded:
        if loaded.pipeline.tokenizer.template() is None:
            raise TemplateError(
                "the model has no chat template, so it is no model to talk with: name one that was trained on "
                "conversations, often called ...-Instruct or ...-it, or go on from a text with `keepwarm run --raw`"
            )
        talk = loaded.sessions.open(session, system=system, salt=salt)
        talking = _Chat(loaded, talk, sampling, as_json)
        with output.resumable(lambda: f"the session stays; `keepwarm chat --session {talking.session.name}` goes on"):
            talking.run()


@dataclass
class _Chat:
    engine: Engine
    session: Session
    sampling: dict[str, Any]
    as_json: bool

    def run(self) -> None:
        self._greet()
        for line in self._lines():
            try:
                if line.startswith("/"):
                    if not self._command(*line[1:].split(maxsplit=1)):
                        return
                elif line.strip():
                    self._turn(self.session.stream(line, **self.sampling))
            except KeepwarmError as error:
                self._print({"error": str(error)}, partial(output.note, f"keepwarm: {error}"))
            except KeyboardInterrupt:  # ends the answer, not the conversation: nothing of it is recorded
                output.note("\n[interrupted]")

    def _lines(self) -> Iterator[str]:
        while True:
            if sys.stdin.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            yield line.rstrip("\n")

    def _greet(self) -> None:
        info = self.session.show().info
        output.note(
            f"session {info.name!r}, {output.counted(info.turns, 'answer')} so far; /help lists what can be typed"
        )

    def _turn(self, pieces: Iterator[Piece]) -> None:
        result: Generation | None = None
        for piece in pieces:
            if not self.as_json:
                print(piece.text, end="", flush=True)
            result = piece.result or result
        assert result is not None, "the last piece of a stream carries the result"
        if self.as_json:
            print(json.dumps({"session": self.session.name} | result.to_dict(), ensure_ascii=False), flush=True)
            return
        print(flush=True)
        computed = result.prompt_tokens - result.cached_tokens
        output.note(
            f"[{result.prompt_tokens:,} prompt tokens, {result.cached_tokens:,} cached ({result.kv_reuse_ratio:.0%}: "
            f"{output.in_tiers(result.cached_by_tier)}), {computed:,} computed | first token after "
            f"{output.in_ms(result.ttft_ms)} | {len(result.token_ids):,} tokens at {result.tokens_per_sec:.1f}/s"
            f"{drafted(result)} | "
            f"{result.exactness}]"
        )
        output.note(f"[{ended(result.miss, result.prompt_tokens - result.cached_tokens)}]")

    def _command(self, name: str = "", rest: str = "") -> bool:
        """Run one command. Return False when it ends the chat. Raises ConfigError."""
        known: dict[str, Callable[[str], None]] = {
            "again": self._again,
            "edit": self._edit,
            "fork": self._fork,
            "why": self._why,
            "show": self._show,
            "sessions": self._sessions,
            "open": self._open,
            "drop": self._drop,
            "help": self._help,
        }
        if name == "quit":
            return False
        if name not in known:
            raise ConfigError(f"there is no /{name}; there are /{', /'.join((*known, 'quit'))}")
        known[name](rest.strip())
        return True

    def _again(self, rest: str) -> None:
        again = self.engine.sessions.again(self.session.name, salt=self.session.salt)
        self._turn(self.engine.stream(**again, **self.sampling))

    def _edit(self, rest: str) -> None:
        messages = self.session.show().messages
        number, text = len(messages), rest
        if rest.startswith("@"):
            wanted, _, text = rest[1:].partition(" ")
            if not wanted.isdigit() or not 1 <= int(wanted) <= len(messages):
                raise ConfigError(f"/edit @N TEXT: N lies between 1 and {len(messages)}, got {wanted!r}")
            number = int(wanted)
        else:
            said = [at for at, message in enumerate(messages, 1) if message["role"] == "user"]
            if not said:
                raise ConfigError("nothing was said yet that could be edited")
            number = said[-1]
        if not text.strip():
            raise ConfigError("/edit TEXT, or /edit @N TEXT: no text was given")
        self.session.edit(number - 1, text)
        if self.session.show().waits:
            self._again("")

    def _fork(self, rest: str) -> None:
        name, _, count = rest.partition(" ")
        if not name or (count and not count.isdigit()):
            raise ConfigError("/fork NAME, or /fork NAME N with a number of messages")
        self.session = self.session.fork(name, at=int(count) if count else None)
        messages = self.session.show().messages
        self._print(
            {"session": name, "messages": list(messages)},
            lambda: output.note(f"now in {name!r}, which begins with {output.counted(len(messages), 'message')}"),
        )

    def _why(self, rest: str) -> None:
        explanation = self.session.explain(rest or None)
        self._print({"explanation": explanation.to_dict()}, lambda: print_explanation(explanation))

    def _show(self, rest: str) -> None:
        view = self.session.show()

        def lines() -> None:
            for number, message in enumerate(view.messages, 1):
                print(f"{number:>3} {message['role']}: {message['content']}")
            for count in view.branches:
                output.note(f"a branch leaves after message {count}")

        self._print(view.to_dict(), lines)

    def _sessions(self, rest: str) -> None:
        found = self.engine.sessions.list(self.session.salt)
        rows = [
            (
                each.name,
                f"{each.turns:,}",
                f"{each.tokens:,}",
                "yes" if each.settled else "no",
                output.in_short_time(each.used),
            )
            for each in found
        ]
        headers = ("session", "answers", "tokens", "settled", "last used")
        self._print(
            {"sessions": [each.to_dict() for each in found]}, lambda: output.print_table(headers, rows, right=(1, 2))
        )

    def _open(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/open NAME: no name was given")
        self.session = self.engine.sessions.open(rest, salt=self.session.salt)
        self._greet()

    def _drop(self, rest: str) -> None:
        name = rest or self.session.name
        dropped = self.engine.sessions.drop(name, salt=self.session.salt)
        if name == self.session.name:
            self.session = self.engine.sessions.open(name, salt=self.session.salt)
        told = f"{name!r} is forgotten" if dropped else f"there is no session {name!r}"
        self._print({"dropped": dropped, "session": name}, lambda: output.note(told))

    def _help(self, rest: str) -> None:
        self._print({"help": HELP}, lambda: output.note(HELP))

    def _print(self, value: dict[str, Any], otherwise: Callable[[], None]) -> None:
        if self.as_json:
            print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
        else:
            otherwise()
