"""Choose the next token from logits, and turn tokens into text as it becomes printable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import Tokenizer
from keepwarm.core.request import Decoding
from keepwarm.core.results import TokenLogprob
from keepwarm.core.stops import StopStrings
from keepwarm.runtime.constrain import Constraint
from keepwarm.runtime.device import DevicePort


class Occurrences(LogitsProcessor):
    """Lowers the scores of tokens that the answer already holds. The prompt's tokens do not count."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._begins = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids[0, self._begins :]
        times = torch.zeros_like(scores[0]).index_add_(0, said, torch.ones_like(said, dtype=scores.dtype))
        lowered = self._presence + self._frequency * times
        return scores - torch.where(times > 0, lowered, 0.0)  # unlike `unique`, no call waits for the device


class Bias(LogitsProcessor):
    """Adds numbers to the scores of given tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._tokens = torch.tensor(list(bias), device=device)
        self._values = torch.tensor([list(bias.values())], dtype=torch.float32, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, self._tokens, self._values)


class NotYet(LogitsProcessor):
    """Keeps tokens that end the answer from being chosen while it is too short."""

    def __init__(self, ends: frozenset[int], length: int, device: torch.device) -> None:
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self._length = length  # prompt and answer together

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, self._ends, -torch.inf) if input_ids.shape[1] < self._length else scores


class Nucleus(LogitsProcessor):
    """Keeps the likeliest tokens that have `top_p` of the probability together, as transformers' `TopPLogitsWarper`
    does, on the host. It sorts only tokens that may be kept: to sort a vocabulary may take longer than to compute a
    token."""

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shares = scores[0].softmax(dim=-1)
        # Tokens below this mean have less than 1 - top_p together, so none of them is kept.
        (some,) = torch.where(shares >= (1 - self._top_p) / len(shares))
        if not len(some):  # the shares are no numbers
            return scores
        order = some[shares[some].sort(descending=True, stable=True).indices]
        sums = shares[order].double().cumsum(dim=-1)
        kept = order[: 1 + int((sums < self._top_p).sum())]
        return torch.full_like(scores, -torch.inf).index_copy_(1, kept, scores[:, kept])


_NONE = -1  # instead of a token that could not be drawn
_TINY = torch.finfo(torch.float32).tiny
_BLOCK = 512  # tokens whose shares are added up first


@dataclass(frozen=True)
class Choice:
    """A chosen token."""

    token: int
    there: torch.Tensor | None = None  # the same on the model's device, `[1]`, if that is not the host


def fetched(chosen: Sequence[int | torch.Tensor]) -> list[Choice]:
    """Return what samplers chose. If that is on a device, the host waits for it, once for all."""
    there = [each for each in chosen if isinstance(each, torch.Tensor)]
    tokens = iter(torch.cat(there).cpu().tolist() if there else [])
    return [Choice(next(tokens), each) if isinstance(each, torch.Tensor) else Choice(each) for each in chosen]


def drawn(shares: torch.Tensor, generator: torch.Generator | None) -> int:
    """Draw a token by its share, on the host; `_NONE` if some shares are no numbers.

    `torch.multinomial` draws a number for every token, which takes a tenth of the time of a small model's step.
    """
    return token_at(shares, float(torch.rand((), dtype=torch.float64, generator=generator)))


def token_at(shares: torch.Tensor, point: float) -> int:
    """Return the token at a `point`, in [0, 1), of the shares `[vocab]`, float32, one behind the other."""
    blocks = nn.functional.pad(shares, (0, -len(shares) % _BLOCK)).view(-1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=0)
    if not ends[-1].isfinite():
        return _NONE
    at = point * ends[-1]
    number = int(torch.searchsorted(ends, at, right=True))
    inside = blocks[number].double().cumsum(dim=0)
    token = int(torch.searchsorted(inside, at - (ends[number - 1] if number else 0.0), right=True))
    last = int(blocks[number].nonzero()[-1])  # both sums round, so that the point may lie behind all of them
    return number * _BLOCK + min(token, last)


class Sampler:
    """Chooses the tokens of one request, with transformers' logits processors and those above."""

    def __init__(
        self,
        params: Decoding,
        prompt: TokenIds,
        port: DevicePort,
        constraint: Constraint | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """`port` is one to the device of the logits. `ends` are the tokens that end the answer. None of them is chosen
        before `min_tokens` tokens."""
        self._port, device = port, port.device
        self._constraint = constraint
        self._greedy = params.temperature == 0
        self._processors = LogitsProcessorList()
        if params.logit_bias:
            self._processors.append(Bias(params.logit_bias, device))
        if params.repetition_penalty not in (None, 1.0):
            self._processors.append(RepetitionPenaltyLogitsProcessor(penalty=params.repetition_penalty))
        presence, frequency = params.presence_penalty or 0.0, params.frequency_penalty or 0.0
        if presence or frequency:
            self._processors.append(Occurrences(presence, frequency, len(prompt)))
        if params.min_tokens:
            self._processors.append(NotYet(ends, len(prompt) + params.min_tokens, device))
        if not self._greedy:
            if params.temperature != 1.0:
                self._processors.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k is not None:
                self._processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p is not None and params.top_p < 1:
                self._processors.append((Nucleus if port.is_host else TopPLogitsWarper)(params.top_p))
            if params.min_p:
                self._processors.append(MinPLogitsWarper(params.min_p))
        # only processors read the ids generated so far
        self._ids = port.upload(prompt.astype("int64"))[None] if self._processors else None
        self._generator = None if self._greedy else torch.Generator(device=device)
        if self._generator is not None:
            if params.seed is not None:
                self._generator.manual_seed(params.seed)
            else:
                self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int | torch.Tensor:
        """Choose the next token from logits `[vocab]`. On a device the choice stays there, `[1]`, and the host does not
        wait for it: see `fetched`. Call `take` with the token before the next choice."""
        allowed = self._constraint.allowed(len(logits)) if self._constraint is not None else None
        if self._port.is_host and self._greedy and self._ids is None:
            every = logits.float().cpu().numpy()  # takes a fifth of the time of torch's argmax; the same token
            return int((every if allowed is None else np.where(allowed, every, -np.inf)).argmax())
        with torch.inference_mode():
            token = self._drawn(logits, allowed)
        return int(token) if self._port.is_host else token

    def take(self, token: int) -> None:
        """Note the chosen token. Raises RuntimeError for `_NONE`."""
        if token == _NONE:
            raise RuntimeError(
                "no token can be drawn, for the probability of some is not a number: expected finite logits after "
                "temperature and penalties; raise the temperature, or look at the model's dtype"
            )
        if self._constraint is not None:
            self._constraint.take(token)

    def _drawn(self, logits: torch.Tensor, allowed: npt.NDArray[np.bool_] | None) -> torch.Tensor:
        scores = logits[None].to(self._port.device, torch.float32)
        if allowed is not None:  # first, so that top-k and top-p choose among allowed tokens
            scores = scores.masked_fill(self._port.upload(~allowed), -torch.inf)
        if self._ids is not None:
            scores = self._processors(self._ids, scores)  # type: ignore[arg-type]
        if self._greedy:
            token = scores.argmax(dim=-1)
        elif self._port.is_host:
            token = torch.tensor([drawn(scores[0].softmax(dim=-1), self._generator)])
        else:  # what multinomial does, but for its look at the numbers, which waits for the device
            shares = scores.softmax(dim=-1)
            times = torch.empty_like(shares).exponential_(generator=self._generator)
            race = shares / times.clamp_min_(_TINY)  # a time of 0 would let a token win that has no share
            token = torch.where(shares.isfinite().all(dim=-1), race.argmax(dim=-1), _NONE)
        if self._ids is not None:
            self._ids = torch.cat([self._ids, token[None]], dim=1)
        return token

    @property
    def is_plain(self) -> bool:
        """Whether it chooses the token with the largest logit."""
        return self._greedy and self._ids is None and self._constraint is None

    @property
    def needs_no_host(self) -> bool:
        """Whether the next choice depends on nothing that only the host computes."""
        return self._constraint is None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete: the constraint allows no further token."""
        return self._constraint is not None and self._constraint.ended


def logprobs(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probabilities of `token` and of the `top` likeliest ones, in float32, from the model's own logits
    `[vocab]`."""
    with torch.inference_mode():
        every = torch.log_softmax(logits.to(torch.float32), dim=-1)
        best, ids = every.topk(min(top, len(every)))
        return TokenLogprob(token, float(every[token]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))


class TextStream:
    """The text of growing token ids. It releases only text that later tokens cannot change, and finds stop strings.

    It also finds a stop string that spans several tokens: a possible beginning of one is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """Stop strings in the text of the first `min_tokens` tokens are not looked for."""
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._decoded = 0  # tokens whose text is in `text`
        self._context = 0  # first token decoded for context, so that joins (spaces, bytes) come out right
        self.text = ""  # ends before a stop string
        self.cut = False  # True once a stop string ended the text
        self._given = 0

    def push(self, token: int) -> str:
        """Add a token. Return the newly printable text."""
        self._ids.append(token)
        context = self._ids[self._context : self._decoded]
        before = self._tokenizer.decode(context, skip_special_tokens=True) if context else ""
        now = self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=True)
        if len(now) > len(before) and not now.endswith("\N{REPLACEMENT CHARACTER}"):
            self._add(now[len(before) :])
            self._context, self._decoded = self._decoded, len(self._ids)
        return self._release(held=0 if self.cut else self._stops.held)

    def finish(self) -> str:
        """Return the text held back until now, incomplete characters included; nothing after a stop string."""
        if not self.cut and self._decoded < len(self._ids):
            before = self._tokenizer.decode(self._ids[self._context : self._decoded], skip_special_tokens=True)
            self._add(self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=True)[len(before) :])
            self._decoded = len(self._ids)
        return self._release(held=0)

    def whole(self) -> str:
        """Return all text with its special tokens, from which calls are parsed; after a stop string, `text`."""
        return self.text if self.cut else self._tokenizer.decode(self._ids)

    def _add(self, piece: str) -> None:
        begins = self._stops.read(piece) if len(self._ids) > self._min_tokens else None
        self.cut = begins is not None
        self.text = self.text + piece if begins is None else (self.text + piece)[: len(self.text) + begins]

    def _release(self, held: int) -> str:
        piece = self.text[self._given : max(len(self.text) - held, self._given)]
        self._given += len(piece)
        return piece
