"""Loading layer by layer: work in threads, the sink in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait

from keepwarm.core.ports import Bytes, KVSink


def targets(sink: KVSink, layers: int, start: int, end: int) -> list[tuple[Bytes, Bytes]]:
    """The sink's views of keys and values of positions `[start, end)`, per layer."""
    return [(sink.view(layer, 0, start, end), sink.view(layer, 1, start, end)) for layer in range(layers)]


def run_layers(
    executor: Executor | None, layers: int, work: Callable[[int], None], commit: Callable[[int], None]
) -> None:
    """`work` for each layer, in the executor's threads if there is one; `commit` in layer order, in this thread.

    The first error is raised after all work has ended, so that none writes into the sink any more.
    """
    if executor is None:
        for layer in range(layers):
            work(layer)
            commit(layer)
        return
    futures = [executor.submit(work, layer) for layer in range(layers)]
    try:
        for layer, future in enumerate(futures):
            future.result()
            commit(layer)
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise
