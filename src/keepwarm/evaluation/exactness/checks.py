"""The checks of a proof: each asks the same prompts in two ways and compares the answers.

A prompt is cold because it begins with a number that nobody asked before. Where a server can be told to use nothing
that it has cached (by a new `cache_salt`, or by llama.cpp's `cache_prompt: false`), a prompt is asked once more in this
way, which is cold too; where it cannot, it is compared with the same prompt asked again.
"""

from __future__ import annotations

import secrets
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from keepwarm.errors import KeepwarmError
from keepwarm.evaluation.exactness.server import Answer, Cold, Server

PROMPTS = 8  # so many are also asked at once
COLD: dict[Cold, str] = {"cache_salt": "cold, under a new salt", "cache_prompt": "cold, without the cache"}

TEXT = """\
The harbour office keeps one book for every pier. A ship that comes in is written down with its name, its length \
in metres, its draught, the hour at which the pilot went aboard and the pier that it was given. Pier one has \
eleven metres of water at low tide and is kept for ships that carry grain. Pier two has nine metres and two \
cranes, of which the older one lifts twelve tonnes and the newer one forty. Pier three is for ferries: no ship may \
lie there between six in the morning and ten at night, except when the harbour master signs for it. Pier four was \
closed in March, because its piles are to be driven anew, and will be opened in autumn. Fuel is brought by barge, \
never by road, and only while the wind is below seven. Whoever wants to leave at night asks before five in the \
afternoon. The office is open from seven to seven; at other times the watch on the tower answers the radio on \
channel twelve. Fees are counted by length and by day, and a day begins at noon. A ship that waits in the roads \
pays half. Complaints are made in writing, and are answered within three weeks by the clerk who has the book of \
the pier in question.
"""
QUESTIONS = (
    "Which pier is for grain, and why?",
    "What may lie at pier three at noon?",
    "How heavy a load can be lifted at pier two?",
    "When does a day begin, and who pays half?",
    "What happened in March, and what comes in autumn?",
    "How is fuel brought, and when not?",
    "Who answers at night, and on which channel?",
    "How does one complain, and who answers?",
)


@dataclass(frozen=True)
class Pair:
    """The same tokens answered in two ways."""

    reference: Answer
    tested: Answer

    @property
    def equal(self) -> bool:
        """Whether the text, the tokens and every printed digit of the log-probabilities are equal."""
        one, other = self.reference, self.tested
        return (one.text, one.tokens, one.logprobs) == (other.text, other.tokens, other.logprobs)

    @property
    def differs_at(self) -> int | None:
        """The first token at which the answers differ; None if they do not, or if the server does not list tokens."""
        tokens = zip(self.reference.tokens, self.tested.tokens, strict=False)
        found = next((number for number, (one, other) in enumerate(tokens) if one != other), None)
        if found is None and len(self.reference.tokens) != len(self.tested.tokens):
            return min(len(self.reference.tokens), len(self.tested.tokens))
        return found

    @property
    def difference(self) -> Decimal | None:
        """The largest difference in log-probability among the equal tokens; None without any."""
        end = self.differs_at
        both = zip(self.reference.logprobs[:end], self.tested.logprobs[:end], strict=False)
        return max((abs(one - other) for one, other in both), default=None)


@dataclass(frozen=True)
class Check:
    """One check's outcome."""

    name: str
    against: str  # what the answers were compared with
    pairs: tuple[Pair, ...]
    left_out: int = 0  # prompts that could not be compared
    why: str = ""  # why they were left out

    @property
    def equal(self) -> int:
        return sum(pair.equal for pair in self.pairs)

    @property
    def same_tokens(self) -> int:
        """How many prompts were answered with equal tokens, whatever their log-probabilities."""
        return sum(pair.differs_at is None and pair.reference.text == pair.tested.text for pair in self.pairs)

    @property
    def passed(self) -> bool:
        return self.equal == len(self.pairs)

    @property
    def difference(self) -> Decimal | None:
        return max((pair.difference for pair in self.pairs if pair.difference is not None), default=None)

    @property
    def cached(self) -> tuple[int, int] | None:
        """Tokens of all prompts that the server says it had cached, and how many they have; None if it says neither."""
        told = [
            (pair.tested.cached_tokens, pair.tested.prompt_tokens)
            for pair in self.pairs
            if pair.tested.cached_tokens is not None and pair.tested.prompt_tokens is not None
        ]
        return (sum(cached for cached, _ in told), sum(length for _, length in told)) if told else None

    @property
    def ttft_ms(self) -> tuple[float, float] | None:
        """Medians: of the reference, and of what is tested."""
        if not self.pairs:
            return None
        reference = statistics.median(pair.reference.ttft_ms for pair in self.pairs)
        return reference, statistics.median(pair.tested.ttft_ms for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Differences keep their digits as texts."""
        cached, ttft = self.cached, self.ttft_ms
        return {
            "check": self.name,
            "against": self.against,
            "prompts": len(self.pairs),
            "equal": self.equal,
            "same_tokens": self.same_tokens,
            "left_out": self.left_out,
            "why_left_out": self.why,
            "largest_logprob_difference": None if self.difference is None else str(self.difference or 0),
            "first_other_token": [pair.differs_at for pair in self.pairs],
            "cached_tokens": None if cached is None else cached[0],
            "prompt_tokens": None if cached is None else cached[1],
            "ttft_ms": None if ttft is None else {"reference": round(ttft[0], 1), "tested": round(ttft[1], 1)},
        }


@dataclass
class Asked:
    """Prompts and their answers, to compare across a restart. `to_dict` makes them JSON-ready."""

    prompts: list[str]
    new_tokens: int
    answers: list[Answer] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"answers": [answer.to_dict() for answer in self.answers]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Asked:
        """Read what `to_dict` wrote."""
        answers = [Answer.from_dict(each) for each in given["answers"]]
        prompts = list(given["prompts"])
        if not prompts or len(prompts) != len(answers):
            raise ValueError(f"{len(prompts)} prompts and {len(answers)} answers")
        return cls(prompts, int(given["new_tokens"]), answers)


def _refuse_empty(answers: Sequence[Answer]) -> None:
    if not any(answer.text or answer.tokens for answer in answers):
        raise KeepwarmError("all answers are empty, so there is nothing to compare; is --endpoint right?")


class Checks:
    """Asks one server, check by check."""

    def __init__(self, server: Server, new_tokens: int, text: str = TEXT, say: Callable[[str], None] = print) -> None:
        """`text` follows the number at each prompt's beginning, and is the same in all prompts. `say` gets the name of
        the check that begins."""
        self._server, self._new, self._text, self._say = server, new_tokens, text, say
        self._run = secrets.token_hex(6)
        self._cold: Cold | None = None  # how a prompt that is cached is asked cold; known after the first check
        self.asked = Asked([self._prompt(number, "a") for number in range(PROMPTS)], new_tokens)

    def all(self) -> Iterator[Check]:
        """Run all checks except that of a restart, and yield each as it ends. Raises KeepwarmError."""
        self._say("cold, and again")
        cold = [self._ask(prompt) for prompt in self.asked.prompts]
        _refuse_empty(cold)
        again = [self._ask(prompt) for prompt in self.asked.prompts]
        self.asked.answers = again
        yield Check("asked again", "cold", _pairs(cold, again))
        if "logprobs" in self._server.takes:
            self._say("without log-probabilities")
            plain = [self._server.ask(prompt, self._new, logprobs=False) for prompt in self.asked.prompts]
            yield Check("without logprobs", "with them", _pairs(list(map(_plain, again)), list(map(_plain, plain))))
        self._say(f"{PROMPTS} at once")
        yield Check(f"{PROMPTS} at once, warm", "alone, warm", _pairs(again, self._at_once(self.asked.prompts)))
        self._cold = self._way_to_ask_cold()
        if self._cold is not None:
            together = self._at_once(self.asked.prompts, self._cold)
            if _were_cold(together):
                yield Check(f"{PROMPTS} at once, cold", "alone, cold", _pairs(cold, together))
        self._say("a shared beginning")
        yield self._shared()
        if self._server.endpoint == "completions":
            self._say("decoded, then prefilled")
            yield self._prefilled(cold)

    def again(self, before: Asked, name: str) -> Check:
        """Ask earlier prompts once more. Raises KeepwarmError."""
        self._say(name)
        answers = [self._server.ask(prompt, before.new_tokens) for prompt in before.prompts]
        _refuse_empty(answers)
        return Check(name, "before", _pairs(before.answers, answers))

    def _shared(self) -> Check:
        """Ask prompts that begin like one that was asked before."""
        for number in range(PROMPTS):
            self._ask(self._prompt(number, "b", of=number + 1))
        prompts = [self._prompt(number, "b") for number in range(PROMPTS)]
        tested = [self._ask(prompt) for prompt in prompts]
        reference, against = self._cold_or_again(prompts)
        return Check("beginning shared", against, _pairs(reference, tested))

    def _prefilled(self, decoded: Sequence[Answer]) -> Check:
        """Ask prompts that end with half of their own answer. So tokens that were decoded before are prefilled now.
        Where the server gives ids, they are the prompt: a text may have other tokens when it is tokenized again."""
        pairs, why, left_out = [], "", 0
        cold = self._cold or next(self._ways(), None)  # heeded or not: a server may not tell
        for prompt, whole in zip(self.asked.prompts, decoded, strict=True):
            half = len(whole.tokens) // 2
            begun: str | tuple[int, ...] | None = _begun_ids(whole, half) or _begun(prompt, whole, half)
            if begun is None:
                why, left_out = "the answer is too short, or the server lists no tokens", left_out + 1
                continue
            tested = self._server.ask(begun, self._new - half, cold)
            if reason := _not_prefilled(whole, tested, half):
                why, left_out = reason, left_out + 1
            elif isinstance(begun, str):
                pairs.append(Pair(_rest(whole, half), tested))
            else:
                pairs.append(Pair(_by_ids(whole, half), _by_ids(tested)))
        return Check("prefilled", "decoded", tuple(pairs), left_out, why)

    def _cold_or_again(self, prompts: Sequence[str]) -> tuple[list[Answer], str]:
        """Return answers to compare with, and their kind: cold if the server can be asked so, else the same prompts
        asked again."""
        if self._cold is not None:
            cold = [self._server.ask(prompt, self._new, self._cold) for prompt in prompts]
            if _were_cold(cold):
                return cold, COLD[self._cold]
        return [self._ask(prompt) for prompt in prompts], "asked again"

    def _way_to_ask_cold(self) -> Cold | None:
        """Return the first field under which a prompt that is cached is answered cold. A server may accept a field and
        ignore it."""
        prompt = self.asked.prompts[0]
        return next((way for way in self._ways() if _were_cold([self._server.ask(prompt, 1, way)])), None)

    def _ways(self) -> Iterator[Cold]:
        return (way for way in COLD if way in self._server.takes)

    def _at_once(self, prompts: Sequence[str], cold: Cold | None = None) -> list[Answer]:
        together = threading.Barrier(len(prompts))

        def ask(prompt: str) -> Answer:
            together.wait()
            return self._server.ask(prompt, self._new, cold)

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(ask, prompts))

    def _ask(self, prompt: str) -> Answer:
        return self._server.ask(prompt, self._new)

    def _prompt(self, number: int, series: str, of: int | None = None) -> str:
        """Return a prompt that begins like no other prompt of this proof, with question number `of`."""
        question = QUESTIONS[(number if of is None else of) % len(QUESTIONS)]
        return f"{self._run}{series}{number}: {self._text}\nQuestion: {question}\nAnswer:"


def _were_cold(answers: Sequence[Answer]) -> bool:
    """Return whether prompts were answered cold. If the server does not report cached tokens, they count as not
    cold."""
    told = [answer.cached_tokens for answer in answers]
    lengths = [answer.prompt_tokens or 0 for answer in answers]
    return all(cached is not None and cached * 2 < length for cached, length in zip(told, lengths, strict=True))


def _pairs(references: Sequence[Answer], tested: Sequence[Answer]) -> tuple[Pair, ...]:
    return tuple(Pair(one, other) for one, other in zip(references, tested, strict=True))


def _begun_ids(answer: Answer, half: int) -> tuple[int, ...]:
    """Return the ids of a prompt with the first `half` tokens of its answer; empty if the server does not give them,
    an id for each token."""
    given = half and answer.prompt_ids and len(answer.ids) == len(answer.tokens)
    return answer.prompt_ids + answer.ids[:half] if given else ()


def _begun(prompt: str, answer: Answer, half: int) -> str | None:
    """Return a prompt with the first `half` tokens of its answer as text; None if they are none."""
    begun = "".join(answer.tokens[:half])
    return prompt + begun if half and answer.text.startswith(begun) else None


def _not_prefilled(whole: Answer, tested: Answer, half: int) -> str:
    """Return why an answer cannot be compared with the rest of the whole one; empty if it can."""
    if tested.prompt_tokens is None or whole.prompt_tokens is None:
        return "the server reports no numbers of tokens"
    if tested.prompt_tokens != whole.prompt_tokens + half:
        return "the text has other tokens when it is tokenized again"
    if (tested.cached_tokens or 0) > whole.prompt_tokens:
        return "the server reused tokens that it decoded"
    return ""


def _rest(answer: Answer, half: int) -> Answer:
    """Return the answer without its first `half` tokens."""
    text = answer.text.removeprefix("".join(answer.tokens[:half]))
    return replace(answer, text=text, tokens=answer.tokens[half:], logprobs=answer.logprobs[half:])


def _plain(answer: Answer) -> Answer:
    """Return the answer with its ids as tokens, if there are any, and without log-probabilities."""
    return replace(answer, tokens=tuple(map(str, answer.ids)), logprobs=())


def _by_ids(answer: Answer, first: int = 0) -> Answer:
    """Return the answer from its token `first` on with ids in place of texts: where an answer begins within a word or
    a character, its first text may be another one."""
    tokens = tuple(map(str, answer.ids[first:]))
    return replace(answer, text="", tokens=tokens, logprobs=answer.logprobs[first:])
