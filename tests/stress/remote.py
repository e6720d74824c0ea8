"""Kills and starts a Redis and an S3 server while replicas load and save through them.

    python -m tests.stress.remote [--seconds 60] [--replicas 3] [--out FILE]

Ends with an error for a wrong byte, for a call that takes longer than its time-outs allow, and for a replica whose
remotes do not work again at the end without a restart of the replica.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import threading
import time
from pathlib import Path

from tests.helpers.remotes import redis_server, s3_server
from tests.stress.common import TURNS, conversation

from keepwarm.store import Archive
from keepwarm.store.remote.limits import Limits

LIMITS = Limits(timeout=0.5, load_timeout=2.0, write_timeout=3.0)
TIMEOUT = 180.0  # seconds that a replica may take to bring its last runs to a slow S3 server in this very process
SLOWEST = 30.0  # seconds: many time-outs of one call's several questions, on a busy machine


class Replica(threading.Thread):
    """Grows conversations and asks for those of the others, with an empty RAM tier each time."""

    def __init__(self, urls: list[str], seed: int, stop: threading.Event) -> None:
        super().__init__()
        self.archive = Archive.open(None, max_ram=1 << 22, max_disk=0, remotes=urls, limits=LIMITS)
        self.random, self.stop = random.Random(seed), stop
        self.found = self.saved = 0
        self.slowest = 0.0
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                one = conversation(self.random.randrange(40))
                started = time.monotonic()
                self.archive.clear_ram()
                turns = one.check(self.archive)
                self.found += turns
                self.slowest = max(self.slowest, time.monotonic() - started)
                if turns < TURNS:
                    one.put(self.archive, 0, min(TURNS, turns + 2))
                    self.saved += 1
                    self.archive.flush()
        except BaseException as error:
            self.problem = error

    @property
    def working(self) -> bool:
        return all(behind.tier.working for behind in self.archive.remotes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON line is added to this file")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to S3
    chance, stop = random.Random(options.seed), threading.Event()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as redis, s3_server() as s3:
        urls = [redis.url, s3.bucket("stress")]
        replicas = [Replica(urls, seed, stop) for seed in range(options.replicas)]
        for each in replicas:
            each.start()
        end, kills = time.monotonic() + options.seconds, 0
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.2, 3.0))
            kill, start = (redis.kill, redis.start) if chance.random() < 0.6 else (s3.stop, s3.start)
            kill()
            time.sleep(chance.uniform(0.0, 2.0))
            start()
            kills += 1
        stop.set()
        for each in replicas:
            each.join(TIMEOUT)
            assert not each.is_alive(), "a replica hangs"
            assert each.problem is None, repr(each.problem)
        deadline = time.monotonic() + 60.0
        while not all(each.working for each in replicas):
            assert time.monotonic() < deadline, "a remote is not used again"
            time.sleep(0.1)
        slowest = max(each.slowest for each in replicas)
        assert slowest < SLOWEST, f"a call took {slowest:.1f} s"
        found, saved = sum(each.found for each in replicas), sum(each.saved for each in replicas)
        failures = sum(b.tier.breaker.opened for each in replicas for b in each.archive.remotes)
        for each in replicas:
            each.archive.close()
    line = {
        "stress": "remote",
        "kills": kills,
        "failures_noticed": failures,
        "turns_found": found,
        "saved": saved,
        "wrong": 0,
        "slowest_s": round(slowest, 2),
        "seconds": options.seconds,
        "replicas": options.replicas,
        "seed": options.seed,
    }
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
