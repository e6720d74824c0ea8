"""Redis or Valkey as the service under a remote tier.

Every exchange is one pipeline of binary commands per server. Bodies are stored in pieces whose keys share a hash tag,
so one server of a cluster holds a run's bytes. They are received directly into the place of the KV, since the parser of
redis-py copies every byte several times. No command touches keys of two slots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from keepwarm.errors import ConfigError, CorruptRun, RemoteFull, RemoteUnavailable
from keepwarm.store.remote.backend import redacted, remaining
from keepwarm.store.runfile.source import Source

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.retry import Retry

    from keepwarm.store.remote.receiving import receiving
except ImportError as error:
    raise ConfigError("redis:// needs the package redis: pip install 'keepwarm[redis]'") from error

PIECE = 16 << 20  # bytes of a body under one key
_FANOUT = 1024
_LASTING = {"layout", "names", "n", "purges", "runs", "replicas"}  # kinds of keys without a time to live

_MOVED = (redis.exceptions.MovedError, redis.exceptions.AskError)
_ELSEWHERE = (  # after which a cluster's slots may be on other nodes
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ClusterError,
    redis.exceptions.RedisClusterException,
    OSError,
)

_Command = tuple[Any, ...]


class RedisBlobs:
    """One server, or a cluster (`redis+cluster://`). Implements `store.remote.backend.Blobs`.

    `?prefix=` in the URL sets the prefix of all keys (default `keepwarm:`); the other parameters are redis-py's.
    `ttl` is in seconds.
    """

    name = "redis"
    fanout = _FANOUT
    threads = 2

    def __init__(self, url: str, *, timeout: float, ttl: float | None = None) -> None:
        """Connects on first use. `timeout` (seconds) bounds connecting. Raises ConfigError for an invalid URL."""
        self.label = redacted(url)
        scheme, _, rest = url.partition("://")
        self._ttl = None if ttl is None else max(1, round(ttl * 1000))
        self._cluster: Any = None
        self._known: tuple[tuple[str, int], ...] = ()  # nodes of the cluster, as last learnt
        self._lock = threading.Lock()  # of what is known of the cluster
        try:
            options: dict[str, Any] = parse_url(f"{scheme.removesuffix('+cluster')}://{rest}")  # type: ignore[no-untyped-call]
        except ValueError:
            raise ConfigError(
                f"{self.label} is no Redis URL: expected redis://[user:password@]host[:port][/db]"
            ) from None
        self._prefix = str(options.pop("prefix", "keepwarm:"))
        kind = options.pop("connection_class", redis.Connection)
        wire: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),  # the breaker above decides when to come back
            "protocol": 2,
        }
        self._options = options | wire
        self._tls = kind is redis.SSLConnection
        self._kind = receiving(kind)
        self._nodes: dict[tuple[str, int], redis.ConnectionPool] = {}  # of a cluster
        self._pool: redis.ConnectionPool | None = None
        if scheme.endswith("+cluster"):
            if self._options.pop("db", 0):
                raise ConfigError(f"{self.label} names a database: a cluster has only database 0")
        else:
            self._pool = redis.ConnectionPool(connection_class=self._kind, **self._options)

    # Blobs

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        """See `Blobs.get`: one MGET, or one pipeline per server of a cluster."""
        names = [self._key(key) for key in keys]
        if not names:
            return []
        if self._pool is not None:
            (values,) = self._exchange([("MGET", *names)], names[:1], seconds)
            return list(values)
        return self._exchange([("GET", name) for name in names], names, seconds)

    def put(self, items: Mapping[str, bytes], seconds: float) -> None:
        """See `Blobs.put`."""
        names = [self._key(key) for key in items]
        self._exchange(
            [
                self._set(name, data, lasting=_is_lasting(key))
                for name, (key, data) in zip(names, items.items(), strict=True)
            ],
            names,
            seconds,
        )

    def body(self, key: str, size: int, seconds: float, *, whole: bool) -> Source:
        """See `Blobs.body`; each part is fetched when it is read."""
        return _Body(self, key, size, time.monotonic() + seconds)

    def put_body(self, key: str, data: memoryview, seconds: float) -> None:
        """See `Blobs.put_body`; one piece after another, so that other clients of the server get their turn."""
        deadline = time.monotonic() + seconds
        for number, at in enumerate(range(0, len(data), PIECE)):
            name = self._piece(key, number)
            self._exchange([self._set(name, data[at : at + PIECE])], [name], remaining(deadline, self.label))

    def delete(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """See `Blobs.delete`."""
        names = self._names(keys, bodies)
        self._exchange([("UNLINK", name) for name in names], names, seconds)

    def renew(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """See `Blobs.renew`."""
        if self._ttl is not None:
            names = self._names(keys, bodies)
            self._exchange([("PEXPIRE", name, self._ttl) for name in names], names, seconds)

    def add(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """See `Blobs.add`: the sets are sorted by time."""
        now = f"{time.time():.6f}"
        commands: list[_Command] = []
        for group, members in groups.items():
            commands.append(("ZADD", self._key(group), *(each for member in members for each in (now, member))))
            if self._ttl is not None:  # an earlier version may have given a lasting one a time to live
                name = self._key(group)
                commands.append(("PERSIST", name) if _is_lasting(group) else ("PEXPIRE", name, self._ttl))
        self._exchange(commands, [command[1] for command in commands], seconds)

    def members(self, group: str, seconds: float) -> dict[str, float]:
        """See `Blobs.members`."""
        name = self._key(group)
        (found,) = self._exchange([("ZRANGE", name, 0, -1, "WITHSCORES")], [name], seconds)
        return {found[at].decode(): float(found[at + 1]) for at in range(0, len(found), 2)}

    def is_member(self, group: str, member: str, seconds: float) -> bool:
        """See `Blobs.is_member`."""
        name = self._key(group)
        (score,) = self._exchange([("ZSCORE", name, member)], [name], seconds)
        return score is not None

    def discard(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """See `Blobs.discard`."""
        names = [self._key(group) for group, members in groups.items() if members]
        commands = [("ZREM", self._key(group), *members) for group, members in groups.items() if members]
        self._exchange(commands, names, seconds)

    def ping(self, seconds: float) -> None:
        """See `Blobs.ping`."""
        name = self._key("ping")
        self._exchange([("EXISTS", name)], [name], seconds)

    def close(self) -> None:
        for pool in [self._pool, *self._nodes.values()]:
            if pool is not None:
                pool.disconnect()
        self._forget()

    # Keys and commands

    def _key(self, key: str) -> str:
        parts = key.split("/")
        if parts[1:2] == ["r"]:  # all of a run in one slot
            parts[2] = "{" + parts[2] + "}"
        return self._prefix + "/".join(parts)

    def _piece(self, key: str, number: int) -> str:
        return f"{self._key(key)}/{number}"

    def _names(self, keys: Sequence[str], bodies: Mapping[str, int]) -> list[str]:
        pieces = (self._piece(key, at // PIECE) for key, size in bodies.items() for at in range(0, size, PIECE))
        return [*(self._key(key) for key in keys), *pieces]

    def _set(self, name: str, data: bytes | memoryview, *, lasting: bool = False) -> _Command:
        return ("SET", name, data) if self._ttl is None or lasting else ("SET", name, data, "PX", self._ttl)

    # Exchanges

    def _exchange(self, commands: Sequence[_Command], names: Sequence[str], seconds: float) -> list[Any]:
        """Send all commands at once, each to the server of its key in `names`. Return the replies in order."""
        deadline = time.monotonic() + seconds
        replies: list[Any] = [None] * len(commands)
        by_pool: dict[int, list[int]] = {}
        pools: dict[int, Any] = {}
        for at, name in enumerate(names[: len(commands)]):
            pool = self._pool_of(name)
            pools[id(pool)] = pool
            by_pool.setdefault(id(pool), []).append(at)
        for key, places in by_pool.items():
            with self._connected(pools[key], deadline) as connection:
                connection.send_packed_command(connection.pack_commands([commands[at] for at in places]))
                for at in places:
                    connection.bound(remaining(deadline, self.label))
                    replies[at] = connection.read_response(disable_decoding=True)
        return replies

    def receive(self, name: str, commands: Sequence[_Command], buffers: list[memoryview], deadline: float) -> None:
        """Fill buffers with the replies of commands on one run's keys, directly from the socket. Raises CorruptRun when
        a reply has another length than requested."""
        with self._connected(self._pool_of(name), deadline) as connection:
            connection.receive(commands, buffers, deadline)

    @contextmanager
    def socket(self, name: str, deadline: float) -> Iterator[int | None]:
        """A connection to the server of a key, as in `Asked.socket`."""
        with self._connected(self._pool_of(name), deadline) as connection:
            yield None if self._tls else connection.descriptor

    def _pool_of(self, name: str) -> Any:
        if self._pool is not None:
            return self._pool
        with self._failing():
            node = self._topology().get_node_from_key(name)
            where = (node.host, node.port)
            with self._lock:
                if where not in self._nodes:
                    options = self._options | {"host": node.host, "port": node.port}
                    self._nodes[where] = redis.ConnectionPool(connection_class=self._kind, **options)
                return self._nodes[where]

    def _topology(self) -> Any:
        """The cluster's topology. Any node that was seen before may provide it, since the URL's node may be gone."""
        with self._lock:
            cluster, known = self._cluster, self._known
        if cluster is not None:
            return cluster
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in known]  # type: ignore[no-untyped-call]
        learnt: Any = redis.RedisCluster(startup_nodes=nodes, ssl=self._tls, **self._options)
        with self._lock:
            if self._cluster is None:
                self._cluster = learnt
                self._known = tuple((node.host, node.port) for node in learnt.get_nodes())
            cluster = self._cluster
        if cluster is not learnt:
            learnt.close()
        return cluster

    def _forget(self) -> None:
        with self._lock:
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    @contextmanager
    def _connected(self, pool: Any, deadline: float) -> Iterator[Any]:
        remaining(deadline, self.label)
        with self._failing():
            connection = pool.get_connection()
            try:
                connection.bound(remaining(deadline, self.label))
                yield connection
            except BaseException:
                connection.disconnect()  # replies may still be on their way
                raise
            finally:
                pool.release(connection)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise RemoteFull(f"{self.label} is full: {error}") from error
        except _MOVED as error:
            self._forget()
            raise RemoteUnavailable(f"{self.label}: slots have moved") from error
        except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            if isinstance(error, _ELSEWHERE):
                self._forget()
            raise RemoteUnavailable(f"{self.label}: {type(error).__name__}: {error}") from error


class _Body:
    """A body that is read from its pieces. Implements `store.runfile.source.Source`."""

    def __init__(self, blobs: RedisBlobs, key: str, size: int, deadline: float) -> None:
        self._blobs = blobs
        self._key = key
        self._names: dict[int, str] = {}
        self.deadline = deadline
        self.size = size

    def read(self, count: int, offset: int) -> bytes:
        data = bytearray(count)
        self.fill(offset, [memoryview(data)])
        return bytes(data)

    def fill(self, offset: int, buffers: list[memoryview]) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)
        if end > self.size:
            raise CorruptRun(f"the body ends at {self.size}, {end} is asked for")
        commands = self._ranges(offset, end)
        self._blobs.receive(commands[0][1], commands, buffers, self.deadline)

    def commands(self, offset: int, size: int) -> list[tuple[bytes, int]]:
        """See `Asked`."""
        return [(_packed(*each), each[3] - each[2] + 1) for each in self._ranges(offset, offset + size)]

    def socket(self) -> AbstractContextManager[int | None]:
        """See `Asked`."""
        return self._blobs.socket(self._ranges(0, 1)[0][1], self.deadline)

    def _ranges(self, offset: int, end: int) -> list[tuple[str, str, int, int]]:
        """Commands that read these bytes. The names of keys are cached."""
        found = []
        for at in range(offset - offset % PIECE, end, PIECE):
            number = at // PIECE
            if number not in self._names:
                self._names[number] = self._blobs._piece(self._key, number)
            found.append(("GETRANGE", self._names[number], max(offset - at, 0), min(end - at, PIECE) - 1))
        return found


def _is_lasting(key: str) -> bool:
    parts = key.split("/")
    return parts[min(1, len(parts) - 1)] in _LASTING


def _packed(name: str, key: str, first: int, last: int) -> bytes:
    return b"*4\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%d\r\n$%d\r\n%d\r\n" % (
        len(name),
        name.encode(),
        len(key.encode()),
        key.encode(),
        len(str(first)),
        first,
        len(str(last)),
        last,
    )
