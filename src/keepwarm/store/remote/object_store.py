"""Object storage as the service under a remote tier, through obstore: S3 and services with its protocol, Google's,
Azure's, and a folder."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from keepwarm.errors import ConfigError, CorruptRun, RemoteFull, RemoteUnavailable, StoreError
from keepwarm.store.remote.backend import redacted, remaining
from keepwarm.store.runfile.source import Gone, Source
from keepwarm.store.threads import Threads

try:
    import obstore
    from obstore.exceptions import BaseError, NotFoundError
    from obstore.store import from_url
except ImportError as error:
    raise ConfigError(
        "s3://, gs://, az:// and file:// need the package obstore: pip install 'keepwarm[objects]'"
    ) from error

PART = 8 << 20  # bytes that one request reads
_FANOUT = 16
_BULK = 1000  # keys of one request to delete

_Result = TypeVar("_Result")
_Argument = TypeVar("_Argument")


class ObjectBlobs:
    """A bucket, container or folder, under a prefix. Implements `store.remote.backend.Blobs`.

    Parameters in the URL are obstore's settings (`?endpoint=http://host:9000&region=...`), and `allow_http=true` for a
    service without TLS whose address is not in the URL. Credentials are taken from where the service's own tools look
    (environment, profile, instance). obstore cannot set a time to live: the tier above, or a rule of the bucket,
    removes unused runs.
    """

    fanout = _FANOUT
    threads = 8

    def __init__(self, url: str, *, timeout: float, reading: float = 5.0, writing: float = 30.0) -> None:
        """Sends no request yet. `timeout` (seconds) bounds connecting. `reading` and `writing` bound one request each,
        even if no caller waits for it any more. Raises ConfigError for an invalid URL."""
        parts = urlsplit(url)
        self.label = redacted(url)
        self.name = parts.scheme
        settings: dict[str, Any] = dict(parse_qsl(parts.query))
        in_the_clear = settings.pop("allow_http", "") == "true" or settings.get("endpoint", "").startswith("http://")
        plain = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        if parts.scheme == "file":
            Path(parts.path).mkdir(parents=True, exist_ok=True)

        def store(seconds: float) -> Any:
            if parts.scheme == "file":
                return from_url(plain)
            options: dict[str, Any] = {
                "config": settings,
                "client_options": {
                    "connect_timeout": timedelta(seconds=timeout),
                    "timeout": timedelta(seconds=max(timeout, seconds)),
                    "allow_http": in_the_clear,
                },
                "retry_config": {"max_retries": 0},  # the breaker above decides when to come back
            }
            return from_url(plain, **options)

        try:
            self._reading, self._writing = store(reading), store(writing)
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.label} cannot be used as a remote: {error}") from None
        self._threads = Threads(_FANOUT, thread_name_prefix="keepwarm-objects")
        # Twice as many as one call uses, so that a lookup finds free threads while a run is being written.
        self._lookups = Threads(2 * _FANOUT, thread_name_prefix="keepwarm-objects-lookup")

    # Blobs

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        """See `Blobs.get`: a request per key, `fanout` at a time."""
        return self._all(self._value, keys, seconds, self._lookups)

    def put(self, items: Mapping[str, bytes], seconds: float) -> None:
        """See `Blobs.put`."""
        self._all(lambda item: obstore.put(self._writing, item[0], item[1]), list(items.items()), seconds)

    def body(self, key: str, size: int, seconds: float, *, whole: bool) -> Source:
        """See `Blobs.body`. A body that is read whole is requested at once, in large parts."""
        return _Body(self, key, size, time.monotonic() + seconds, whole)

    def put_body(self, key: str, data: memoryview, seconds: float) -> None:
        """See `Blobs.put_body`; obstore writes large ones in parts, several at a time."""
        self._all(lambda _: obstore.put(self._writing, key, data), [None], seconds)

    def delete(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """See `Blobs.delete`."""
        names = [*keys, *bodies]
        if self.name in ("file", "gs"):  # where deleting a missing object is an error
            self._all(self._unlink, names, seconds)
        else:
            bulks = [names[at : at + _BULK] for at in range(0, len(names), _BULK)]
            self._all(lambda bulk: obstore.delete(self._writing, bulk), bulks, seconds)

    def renew(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """Does nothing: see the class."""

    def add(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """See `Blobs.add`. Members are empty objects; their time is when they were written."""
        self.put({f"{group}/{member}": b"" for group, members in groups.items() for member in members}, seconds)

    def members(self, group: str, seconds: float) -> dict[str, float]:
        """See `Blobs.members`."""

        def listed(_: None) -> dict[str, float]:
            found: dict[str, float] = {}
            for batch in obstore.list(self._reading, prefix=group, chunk_size=_BULK):
                for meta in batch:
                    found[meta["path"].rpartition("/")[2]] = meta["last_modified"].timestamp()
            return found

        return self._all(listed, [None], seconds, self._lookups)[0]

    def is_member(self, group: str, member: str, seconds: float) -> bool:
        """See `Blobs.is_member`."""
        return self.get([f"{group}/{member}"], seconds) != [None]

    def discard(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """See `Blobs.discard`."""
        self.delete([f"{group}/{member}" for group, members in groups.items() for member in members], {}, seconds)

    def ping(self, seconds: float) -> None:
        """See `Blobs.ping`."""
        self._all(self._value, ["ping"], seconds, self._lookups)

    def send(self, file: Path, key: str, seconds: float) -> None:
        """Upload a file as an object, in parts when it is large."""
        self._all(lambda path: obstore.put(self._writing, key, path), [file], seconds)

    def fetch(self, key: str, file: Path, seconds: float) -> None:
        """Write an object's bytes into a file."""

        def stream(path: Path) -> None:
            with path.open("wb") as out:
                for chunk in obstore.get(self._reading, key).stream(min_chunk_size=PART):
                    out.write(chunk)

        self._all(stream, [file], seconds)

    def close(self) -> None:
        for pool in (self._threads, self._lookups):
            pool.shutdown(wait=False, cancel_futures=True)

    # Requests

    def part(self, key: str, start: int, end: int) -> Future[memoryview]:
        """Begin to read bytes `[start, end)` of a body."""
        return self._submit(
            lambda _: memoryview(obstore.get_range(self._reading, key, start=start, end=end)), None, self._threads
        )

    def result(self, future: Future[_Result], deadline: float) -> _Result:
        """Return the result of a request. Raises RemoteUnavailable, and Gone (a CorruptRun) for a missing object."""
        try:
            return future.result(remaining(deadline, self.label))
        except FutureTimeout:
            raise RemoteUnavailable(f"{self.label} did not answer in time") from None
        except NotFoundError as error:
            raise Gone("its bytes are gone") from error
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError):  # obstore's NotFoundError of a folder is one, too
                raise Gone("its bytes are gone") from error
            raise self._refused(error) from error
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> RemoteUnavailable:
        text = " ".join(str(error).split())[:300]
        full = any(sign in text for sign in ("No space left", "QuotaExceeded", "status: 507", "InsufficientStorage"))
        return (RemoteFull if full else RemoteUnavailable)(f"{self.label}: {text}")

    def _value(self, key: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._reading, key).bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def _unlink(self, key: str) -> None:
        try:
            obstore.delete(self._writing, key)
        except (NotFoundError, FileNotFoundError):
            return

    def _submit(self, work: Callable[[_Argument], _Result], argument: _Argument, pool: Threads) -> Future[_Result]:
        try:
            return pool.submit(work, argument)
        except RuntimeError as error:
            raise RemoteUnavailable(f"{self.label}: it was closed") from error

    def _all(
        self,
        work: Callable[[_Argument], _Result],
        arguments: Sequence[_Argument],
        seconds: float,
        pool: Threads | None = None,
    ) -> list[_Result]:
        """Do `work` for all arguments, `_FANOUT` at a time, so that other calls do not wait behind all of them."""
        deadline = time.monotonic() + seconds
        waiting: deque[Future[_Result]] = deque()
        results: list[_Result] = []
        try:
            for argument in arguments:
                if len(waiting) == _FANOUT:
                    results.append(self.result(waiting.popleft(), deadline))
                waiting.append(self._submit(work, argument, pool or self._threads))
            while waiting:
                results.append(self.result(waiting.popleft(), deadline))
            return results
        finally:
            for future in waiting:
                future.cancel()


class _Body:
    """A body that is read in parts, several requests at a time. Implements `store.runfile.source.Source`."""

    def __init__(self, blobs: ObjectBlobs, key: str, size: int, deadline: float, whole: bool) -> None:
        self._blobs = blobs
        self._key = key
        self._deadline = deadline
        self.size = size
        self._parts = self._ask(0, size) if whole else None

    def read(self, count: int, offset: int) -> bytes:
        data = bytearray(count)
        self.fill(offset, [memoryview(data)])
        return bytes(data)

    def fill(self, offset: int, buffers: list[memoryview]) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)
        if end > self.size:
            raise CorruptRun(f"the body ends at {self.size}, {end} is asked for")
        first = 0 if self._parts is not None else offset
        waiting = list(buffers)
        for number, part in enumerate(self._parts or self._ask(offset, end)):
            at = first + number * PART
            if at + PART <= offset or at >= end:
                continue
            data = self._blobs.result(part, self._deadline)
            if len(data) != min(PART, (self.size if self._parts is not None else end) - at):
                raise CorruptRun(f"a part has {len(data)} bytes, other than were asked for")
            data = data[max(0, offset - at) : end - at]
            while data:
                count = min(len(data), len(waiting[0]))
                waiting[0][:count] = data[:count]
                data, waiting[0] = data[count:], waiting[0][count:]
                if not waiting[0]:
                    waiting.pop(0)

    def _ask(self, start: int, end: int) -> list[Future[memoryview]]:
        return [self._blobs.part(self._key, at, min(at + PART, end)) for at in range(start, end, PART)]


def is_object(url: str) -> bool:
    """Whether a text names an object and not a local file."""
    return urlsplit(url).scheme in ("s3", "gs", "az")


@contextmanager
def local_copy(url: str, *, write: bool, seconds: float = 300.0) -> Iterator[Path]:
    """Yield a temporary file with an object's bytes; with `write`, a path for a file that becomes the object.

    Raises ConfigError for an invalid URL, and StoreError when the object cannot be read or written.
    """
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    if not name:
        raise ConfigError(f"{redacted(url)} names no object: expected s3://bucket/folder/name")
    blobs = ObjectBlobs(urlunsplit(parts._replace(path=folder)), timeout=10.0, reading=seconds, writing=seconds)
    with tempfile.TemporaryDirectory() as place, closing(blobs):
        file = Path(place) / name
        try:
            if not write:
                blobs.fetch(name, file, seconds)
            yield file
            if write:
                blobs.send(file, name, seconds)
        except (RemoteUnavailable, Gone) as error:
            raise StoreError(f"{redacted(url)} cannot be {'written' if write else 'read'}: {error}") from error
