"""Chunk reuse of one engine: naming what a prompt holds, computing chunks off the answering path, watching quality.

A chunk's KV is computed in a little prompt of its own, after a fixed neutral start, and stored under names that know
that start: an answer depends on which chunks are stored, never on what else was asked before. `chunk_contexts="any"`
gives that up for chunks that cost nothing: what a request computed in its own context is kept, too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from keepwarm.checks import chunking_of
from keepwarm.compiler.chunks import candidates
from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.config import DEFAULT_STEP, EngineConfig
from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import Namespace
from keepwarm.core.repair import RepairRule
from keepwarm.core.spans import Reuse
from keepwarm.errors import ConfigError, KeepwarmError, TemplateError
from keepwarm.linker.chunk import Chunk, name_chunk
from keepwarm.linker.edited import shared_chunks
from keepwarm.linker.link import Blending, without_chunks
from keepwarm.models.base import Adapter
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.prefix_loader import Placed
from keepwarm.pipeline.shadow import IDLE_STEP, Shadow, compare
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.blend.repair import blend
from keepwarm.runtime.blend.rope import Relocator
from keepwarm.runtime.blend.scatter import Rows
from keepwarm.runtime.loader import LoadedModel
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

NEUTRAL = "You are a helpful assistant. Answer from the documents below."
_TOGETHER = 4  # chunks handed to the archive before it is waited for: it turns down what it cannot queue
_WAITING = 256  # chunks that wait to be computed; more are not met


def check(model: LoadedModel, config: EngineConfig) -> None:
    """Refuse settings, and a model whose keys cannot be moved, before a store is opened.

    Raises ConfigError and UnsupportedModel.
    """
    chunking_of(config)
    RepairRule.parse(config.repair)
    if config.reuse is Reuse.CHUNKS and not model.uncached_reason:
        Relocator(model.runner, model.geometry, model.form)


class Chunks:
    """What `reuse="chunks"` needs beside the engine. Idle work runs in a thread of its own, when nothing else runs."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        tokenizer: HFTokenizer,
        adapter: Adapter,
        archive: Archive,
        pool: ArenaPool,
    ) -> None:
        self._model, self._config = model, config
        self._tokenizer, self._adapter = tokenizer, adapter
        self._archive, self._pool = archive, pool
        self.chunking = chunking_of(config)
        self._changed = threading.Condition()
        self._active = 0
        self._closed = False
        self._working = False
        self._met: dict[bytes, _Met] = {}  # waiting to be computed, by their last name
        self._shadows: deque[Shadow] = deque(maxlen=16)
        self._thread: threading.Thread | None = None
        self._counts: Counter[str] = Counter()
        self._divergence: list[tuple[float, float]] = []  # of shadows: KL of the first token, agreement

    # ---- what a model can do ----

    @cached_property
    def relocator(self) -> Relocator:
        """Raises UnsupportedModel for a model whose keys cannot be moved."""
        return Relocator(self._model.runner, self._model.geometry, self._model.form)

    @cached_property
    def opening(self) -> TokenIds:
        """The neutral start that chunks are computed after."""
        text = self._config.chunk_start
        if text is not None:
            given = self._tokenizer.compile(text, special=True).ids
            if not len(given):
                raise ConfigError("chunk_start has no tokens: chunks need something to stand on")
            return given
        try:
            shown = self._adapter.render([{"role": "system", "content": NEUTRAL}], answer=False).text
        except TemplateError:
            shown = ""
        at = shown.find(NEUTRAL)
        if at < 0:
            return self._tokenizer.compile(NEUTRAL + "\n\n", special=True).ids
        return self._tokenizer.compile(shown[: at + len(NEUTRAL)] + "\n\n", special=False).ids

    # ---- compile and link ----

    def blending(
        self, prompt: CompiledPrompt, namespace: Namespace, repair: RepairRule, bases: Iterable[Linked] = ()
    ) -> Blending:
        """The prompt's chunks under their names, or what it shares with the first of `bases` that is stored.

        Raises UnsupportedModel; ConfigError for a bound without repair.
        """
        _ = self.relocator
        if self._config.max_divergence is not None and repair.is_none:
            raise ConfigError(
                "max_divergence needs a repair strategy: with repair='none' nothing tells how far chunks diverge"
            )
        edited = None
        for base in bases:
            edited = shared_chunks(prompt.tokens, base.prompt.tokens, base.blocks, self.chunking.least)
            if any(self._archive.find(list(chunk.content)) for chunk in edited):
                break
        if edited is not None:
            return Blending(tuple(edited), repair, self.chunking.least)
        step, named = self._config.step or DEFAULT_STEP, []
        for foreign in (False, True) if self._config.chunk_contexts == "any" else (False,):
            space = _space(namespace, foreign)
            for part in candidates(prompt, self.chunking):
                chunk = name_chunk(
                    prompt.tokens, part.start, part.end, self.opening, space, prompt.extra_keys, step, part.learn
                )
                if chunk is not None:
                    named.append(replace(chunk, foreign=foreign))
        return Blending(tuple(named), repair, self.chunking.least)

    # ---- execute ----

    def compute(self, placed: Placed) -> bool:
        """Compute a prompt with chunks in place to its end. False: there are none, or they diverge beyond the
        configured bound; the plan is then one without chunks, and nothing of it is computed."""
        plan, tokens, arena, runner = placed.plan, placed.linked.prompt.tokens, placed.arena, self._model.runner
        if not plan.relocates:
            return False
        for span in plan.computes:
            if span.end <= plan.blended_from:
                runner.extend(tokens[span.start : span.end], arena.cache, span.start)
        done = blend(plan, tokens, arena, Rows(runner), self._config.step or DEFAULT_STEP, self.relocator.rotaries)
        bound = self._config.max_divergence
        if bound is not None and done.divergence is not None and done.divergence > bound:
            self._count(fallbacks=1)
            arena.seek(plan.prefix_end)
            placed.plan, placed.blended_by_tier = without_chunks(plan, placed.linked.grid, placed.linked.blocks), {}
            return False
        self._count(requests=1, tokens=plan.blended_tokens, repaired=done.repaired)
        placed.blended = done
        return True

    def keep(self, placed: Placed) -> None:
        """With `chunk_contexts="any"`, store the chunks of a prompt without blended KV as they lie in its arena."""
        blending = placed.linked.blending
        if blending is None or placed.plan.relocates:
            return
        for chunk in blending.chunks:
            if chunk.foreign and chunk.learn and not self._is_stored(chunk):
                try:
                    self._copy(placed.arena, chunk, placed.linked.namespace, placed.linked.epoch)
                except (KeepwarmError, RuntimeError) as error:  # the request is answered; no arena was to be had, say
                    log.warning("a chunk of a prompt is not kept: %s", error)
                    self._count(failed=1)
                    return

    def answered(self, linked: Linked, placed: Placed, answer: Sequence[int]) -> None:
        """Take note of an answered request: chunks to compute, a sample to compare, when nothing else runs."""
        if not self._archive.allows(linked.epoch, linked.tags):
            return
        if linked.blending is not None:
            self._meet(linked.blending, linked.namespace, linked.epoch)
        if placed.blended is not None:
            self._sample(Shadow(linked.prompt.tokens, tuple(answer), placed.blended.logits))

    # ---- compute chunks ----

    def learn(self, blending: Blending, namespace: Namespace, epoch: int, *, asked: bool = False) -> tuple[int, int]:
        """Compute and store chunks that are worth it, for what began at `epoch`; returns how many, and the tokens of
        those that were stored.

        Returns when they can be found.
        """
        computed = known = 0
        for chunk in blending.chunks:
            if not chunk.learn or chunk.foreign:
                continue
            if self._is_stored(chunk):
                known += chunk.end - chunk.start
            else:
                self._store(chunk, namespace, asked, epoch)
                computed += 1
                if computed % _TOGETHER == 0:
                    self._archive.flush()
        self._archive.flush()
        return computed, known

    def _meet(self, blending: Blending, namespace: Namespace, epoch: int) -> None:
        if not self._config.learn_chunks:
            return
        new = [chunk for chunk in blending.chunks if chunk.learn and not chunk.foreign and not self._is_stored(chunk)]
        with self._changed:
            for chunk in new:
                if len(self._met) < _WAITING:
                    self._met.setdefault(chunk.ids[-1], _Met(chunk, namespace, epoch))
        if new:
            self._start()

    def _sample(self, shadow: Shadow) -> None:
        """Keep the configured share of blended answers, taken evenly."""
        share = self._config.shadow
        with self._changed:
            seen = self._counts["offered"]
            self._counts["offered"] += 1
        if int((seen + 1) * share) > int(seen * share):
            with self._changed:
                self._shadows.append(replace(shadow, logits=shadow.logits.float().cpu()))
            self._start()

    def _is_stored(self, chunk: Chunk) -> bool:
        return chunk.ids[-1] in self._archive.find(chunk.ids[-1:])

    def _store(self, chunk: Chunk, namespace: Namespace, asked: bool, epoch: int, step: int | None = None) -> None:
        """Run start and content by themselves and hand them to the archive, unless a purge came since `epoch`."""
        with self._handing_over(chunk, namespace, asked, epoch) as arena:
            for block in chunk.blocks:
                size = step or block.length
                for at in range(block.start, block.end, size):
                    part = chunk.tokens[at : min(at + size, block.end)]
                    self._wait_turn(step is not None)
                    self._model.runner.extend(part, arena.cache, at)

    def _copy(self, source: Arena, chunk: Chunk, namespace: Namespace, epoch: int) -> None:
        """Hand content over as it lies in a prompt's arena, its keys turned to where it stands behind the start."""
        with self._handing_over(chunk, namespace, False, epoch) as arena:
            self._model.runner.extend(chunk.tokens[: chunk.opening], arena.cache, 0)
            self.relocator.copy(source, chunk.start, arena, chunk.opening, chunk.end - chunk.start)

    @contextmanager
    def _handing_over(self, chunk: Chunk, namespace: Namespace, asked: bool, epoch: int) -> Iterator[Arena]:
        """An arena to be filled with start and content, which the archive then gets."""
        arena = self._pool.acquire(None, len(chunk.tokens))
        try:
            self._pool.wait_readers(arena, 0)
            arena.seek(0)
            yield arena
            if not self._model.is_current(namespace):
                return
            end = chunk.blocks[-1].end
            self._pool.pin(arena, end)
            space = _space(namespace, chunk.foreign)
            self._archive.put(
                arena,
                chunk.blocks,
                space,
                ids=chunk.ids,
                parent=space.prefix_root,
                on_copied=lambda: self._pool.unpin(arena, end),
                asked=asked,
                epoch=epoch,
            )
            self._count(computed=not chunk.foreign)
        finally:
            self._pool.release(arena)

    # ---- idle work ----

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While a request runs, idle work pauses after its current step."""
        with self._changed:
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait until all idle work is done; False when it is not by then. Who waits holds no open stream."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or not (self._met or self._shadows or self._working), timeout
            )

    def forget(self) -> None:
        """Give up what waits for idle work: a purge must not be followed by what it removed."""
        with self._changed:
            self._met.clear()
            self._shadows.clear()
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Stop idle work, waiting `timeout` seconds at most for the step under way; what waits is abandoned."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """The same without waiting."""
        with self._changed:
            self._closed = True
        self.forget()

    def stats(self) -> dict[str, Any]:
        """Counters, and what shadow runs found."""
        with self._changed:
            names = ("requests", "tokens", "repaired", "fallbacks", "computed", "failed")
            found: dict[str, Any] = {name: self._counts[name] for name in names}
            kl = [divergence for divergence, _ in self._divergence]
            agreement = [agreed for _, agreed in self._divergence]
        found["shadows"] = len(kl)
        if kl:
            found["shadow_first_token_kl"] = {"mean": sum(kl) / len(kl), "max": max(kl)}
            found["shadow_agreement"] = sum(agreement) / len(agreement)
        return found

    def _count(self, **deltas: int) -> None:
        with self._changed:
            self._counts.update(deltas)

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="keepwarm-idle", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _wait_turn(self, idle: bool) -> None:
        if idle:
            with self._changed:
                self._changed.wait_for(lambda: self._active == 0 or self._closed)
            if self._closed:
                raise _Closed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._active == 0 and (self._met or self._shadows)))
                if self._closed:
                    return
                waiting = self._met.pop(next(iter(self._met))) if self._met else None
                shadow = self._shadows.popleft() if waiting is None else None
                self._working = True
            try:
                if waiting is not None:
                    # else the weights changed, or what it is of was purged
                    same = self._model.namespace().model == waiting.namespace.model
                    same = same and self._archive.allows(waiting.epoch, waiting.chunk.blocks[-1].salts)
                    if same and not self._is_stored(waiting.chunk):
                        self._store(waiting.chunk, waiting.namespace, False, waiting.epoch, IDLE_STEP)
                        self._archive.flush()
                elif shadow is not None:
                    found = compare(shadow, self._model.runner, self._pool, lambda: self._wait_turn(True))
                    with self._changed:
                        self._divergence.append(found)
            except _Closed:
                return
            except (KeepwarmError, RuntimeError) as error:
                log.warning("idle work failed: %s", error)
                self._count(failed=1)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()


def _space(namespace: Namespace, foreign: bool) -> Namespace:
    return replace(namespace, purpose="chunks of any context" if foreign else "chunks")


@dataclass(frozen=True, eq=False)
class _Met:
    """A chunk that a request showed."""

    chunk: Chunk
    namespace: Namespace
    epoch: int  # at which the request began


class _Closed(Exception):
    """The engine was closed while idle work ran."""
