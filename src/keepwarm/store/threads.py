"""A pool of threads that works until the program has really ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class Threads(ThreadPoolExecutor):
    """While the interpreter ends, no pool takes work, and from Python 3.12 on no thread can be started. Then the caller
    does the work itself, at once."""

    _ended = False

    def submit(
        self, call: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """See `Executor.submit`. Raises RuntimeError after `shutdown`."""
        try:
            return super().submit(call, *args, **kwargs)
        except RuntimeError:
            if self._ended:
                raise
        done: Future[_Result] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ended = True
        super().shutdown(wait, cancel_futures=cancel_futures)
