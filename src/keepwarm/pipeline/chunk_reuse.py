"""Chunk reuse of one engine: name a prompt's chunks, compute them while no request runs, and measure quality.

A chunk's KV is computed in a small prompt of its own, after a fixed neutral start. Its names include that start, so an
answer depends only on which chunks are stored, not on earlier requests. `chunk_contexts="any"` gives up this guarantee
and gets chunks for free: it also stores chunks that a request computed in its own context.
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
from keepwarm.pipeline.placed import Placed
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
_TOGETHER = 4  # chunks handed to the archive before waiting for it: it turns down what it cannot queue
_LOOK = 0.1  # seconds after which paused idle work looks whether a request waits for its arena
_WAITING = 256  # chunks that may wait to be computed; further ones are ignored


def check(model: LoadedModel, config: EngineConfig) -> None:
    """Check the settings, and that the model's keys can be moved, before a store is opened.

    Raises ConfigError and UnsupportedModel.
    """
    chunking_of(config)
    RepairRule.parse(config.repair)
    if config.reuse is Reuse.CHUNKS and not model.uncached_reason:
        Relocator(model.runner, model.geometry, model.form)


class Chunks:
    """What `reuse="chunks"` needs besides the engine. Idle work has its own thread and runs when nothing else does."""

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
        self._met: dict[bytes, _Met] = {}  # chunks waiting to be computed, by their last name
        self._shadows: deque[Shadow] = deque(maxlen=16)
        self._thread: threading.Thread | None = None
        self._counts: Counter[str] = Counter()
        self._divergence: list[tuple[float, float]] = []  # of shadows: KL of the first token, agreement

    # ---- what a model can do ----

    @cached_property
    def relocator(self) -> Relocator:
        """Moves keys to other positions. Raises UnsupportedModel for a model whose keys cannot be moved."""
        return Relocator(self._model.runner, self._model.geometry, self._model.form)

    @cached_property
    def opening(self) -> TokenIds:
        """The neutral start after which chunks are computed."""
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
        """Return the prompt's named chunks, or those that it shares with the first of `bases` that is stored.

        Raises UnsupportedModel; ConfigError for a divergence bound without repair.
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
        """Compute the rest of a prompt whose chunks are in place. Return False when it has no chunks, or when they
        diverge beyond the configured bound: the plan is then one without chunks, and nothing of it is computed."""
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
        """With `chunk_contexts="any"`, store the chunks of a prompt without blended KV from its arena."""
        blending = placed.linked.blending
        if blending is None or placed.plan.relocates:
            return
        for chunk in blending.chunks:
            if chunk.foreign and chunk.learn and not self._is_stored(chunk):
                try:
                    self._copy(placed.arena, chunk, placed.linked.namespace, placed.linked.epoch)
                except (KeepwarmError, RuntimeError, MemoryError) as error:  # the request is answered anyway
                    log.warning("a chunk of a prompt is not kept: %s", error)
                    self._count(failed=1)
                    return

    def answered(self, linked: Linked, placed: Placed, answer: Sequence[int]) -> None:
        """Note an answered request: queue its chunks to be computed, and perhaps a sample, when nothing else runs."""
        if not self._archive.allows(linked.epoch, linked.tags):
            return
        if linked.blending is not None:
            self._meet(linked.blending, linked.namespace, linked.epoch)
        if placed.blended is not None:
            self._sample(Shadow(linked.prompt.tokens, tuple(answer), placed.blended.logits))

    # ---- compute chunks ----

    def learn(self, blending: Blending, namespace: Namespace, epoch: int, *, asked: bool = False) -> tuple[int, int]:
        """Compute and store the chunks worth learning, for a request that began at `epoch`. Return how many were
        computed, and the number of tokens of those that were stored already.

        When it returns, lookups find the chunks.
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
        """Keep the configured share of blended answers, evenly spaced."""
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
        """Compute start and content on their own and hand them to the archive, unless a purge came since `epoch`."""
        with self._handing_over(chunk, namespace, asked, epoch) as arena:
            for block in chunk.blocks:
                size = step or block.length
                for at in range(block.start, block.end, size):
                    part = chunk.tokens[at : min(at + size, block.end)]
                    self._wait_turn(step is not None)
                    self._model.runner.extend(part, arena.cache, at)

    def _copy(self, source: Arena, chunk: Chunk, namespace: Namespace, epoch: int) -> None:
        """Copy content from a prompt's arena, rotate its keys to positions after the start, and hand it over."""
        with self._handing_over(chunk, namespace, False, epoch) as arena:
            self._model.runner.extend(chunk.tokens[: chunk.opening], arena.cache, 0)
            self.relocator.copy(source, chunk.start, arena, chunk.opening, chunk.end - chunk.start)

    @contextmanager
    def _handing_over(self, chunk: Chunk, namespace: Namespace, asked: bool, epoch: int) -> Iterator[Arena]:
        """Yield an arena, to be filled with start and content; then hand it to the archive."""
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
        """Pause idle work, after its current step, while a request runs."""
        with self._changed:
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait until all idle work is done; return False at the timeout. The caller must not hold an open stream."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or not (self._met or self._shadows or self._working), timeout
            )

    def forget(self) -> None:
        """Drop all queued idle work: it must not store again what a purge removed."""
        with self._changed:
            self._met.clear()
            self._shadows.clear()
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Stop idle work, waiting at most `timeout` seconds for the current step; queued work is dropped."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """Stop idle work without waiting; queued work is dropped."""
        with self._changed:
            self._closed = True
        self.forget()

    def stats(self) -> dict[str, Any]:
        """Return counters and the results of shadow runs."""
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
                while not self._changed.wait_for(lambda: self._active == 0 or self._closed, _LOOK):
                    self._pool.make_way()
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
                    # otherwise the weights changed, or the chunk's source was purged
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
            except (KeepwarmError, RuntimeError, MemoryError) as error:
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
    """A chunk that a request contained."""

    chunk: Chunk
    namespace: Namespace
    epoch: int  # of the store, when the request began


class _Closed(Exception):
    """The engine was closed while idle work ran."""
