"""Kills Redis, an S3 server and a vLLM instance while two vLLM instances load and save through them.

    python -m tests.stress.vllm_faults [--seconds 150] [--seed 0] [--out vllm_faults.jsonl]

Runs in vLLM's environment (`make test-vllm` makes it). A vLLM without connector says which greedy tokens are right;
then two instances share a folder, Redis and S3 (moto's, over HTTP) and answer short and long prompts, alone and
together, with aborted ones between, their own prefix caches emptied each time. Ends with an error for a wrong token,
for an answer that takes longer than its time-outs allow, and for an instance that finds nothing remotely at the end,
when everything works again, without having been started anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.remotes import redis_server, s3_server

from keepwarm.runtime.demo_model import demo_model

INSTANCE = Path(__file__).parents[1] / "vllm" / "instance.py"
LIMITS = {"remote_timeout": 1.0, "remote_load_timeout": 3.0, "load_timeout": 5.0}
SLOWEST = 60.0  # seconds of a step: several time-outs and the computing of all its prompts, on a busy machine
LOADING = 240.0


def ids(count: int, seed: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(10, 40_000, count)]


HEADS = [ids(count, count) for count in (640, 320, 96)]
PROMPTS = [*(head + ids(n, 50 + n) for head in HEADS for n in (3, 31, 40)), ids(5, 60), ids(31, 61), ids(1, 62)]


class Instance:
    """A vLLM process in a group of its own; `kill` leaves it no time for anything."""

    def __init__(self, store: dict[str, Any] | None, log: Path) -> None:
        self._job = {"settings": {"model": str(demo_model())}, "store": store}
        self._log = log
        self.slowest = 0.0
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(INSTANCE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        self._write(self._job)
        self._fresh = True

    def ask(self, **step: Any) -> Any:
        """What comes of a step; None when the instance was killed meanwhile."""
        started = time.monotonic()
        try:
            self._write(step)
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], LOADING if self._fresh else SLOWEST)
            assert ready, f"no answer within the time-outs: {self._log.read_text(errors='replace')[-2000:]}"
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        if not line:
            return None
        if not self._fresh:
            self.slowest = max(self.slowest, time.monotonic() - started)
        self._fresh = False
        return json.loads(line)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")


class Client(threading.Thread):
    """Asks one instance until it is told to stop, and compares every answer."""

    def __init__(self, instance: Instance, right: list[list[int]], seed: int, stop: threading.Event) -> None:
        super().__init__()
        self.instance, self.right = instance, right
        self.random, self.stop = random.Random(seed), stop
        self.answers = self.cached = self.interrupted = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.turn()
        except BaseException as error:
            self.problem = error

    def turn(self) -> int:
        """Some prompts, alone or together; returns how many tokens vLLM says were cached."""
        places = self.random.sample(range(len(PROMPTS)), self.random.choice([1, 1, 3, 6]))
        step = {"prompts": [PROMPTS[at] for at in places], "max_tokens": 6, "together": self.random.random() < 0.7}
        found = self.instance.ask(**step)
        if found is None:  # killed: whoever did it starts it again
            self.interrupted += 1
            time.sleep(1.0)
            return 0
        for at, answer in zip(places, found, strict=True):
            assert answer["ids"] == self.right[at], f"wrong tokens for prompt {at}: {answer}, not {self.right[at]}"
        self.answers += len(found)
        cached = sum(answer["cached"] for answer in found)
        self.cached += cached
        if self.random.random() < 0.2:
            self.instance.ask(abort=ids(400, self.random.randrange(1000)))
        self.instance.ask(forget=True)
        return cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON line is added to this file")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to S3
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as redis, s3_server() as s3:
        folder = Path(name)
        plain = Instance(None, folder / "plain.log")
        right = [answer["ids"] for answer in plain.ask(prompts=PROMPTS, max_tokens=6)]
        plain.kill()
        remotes = {"remote": [redis.url, s3.bucket("stress")], "max_ram": "16MiB"} | LIMITS
        settings = [remotes | {"store": str(folder / "store"), "max_disk": "1GiB"}, remotes]
        instances = [Instance(each, folder / f"{at}.log") for at, each in enumerate(settings)]
        stop = threading.Event()
        clients = [Client(each, right, options.seed + at, stop) for at, each in enumerate(instances)]
        for client in clients:
            client.turn()  # both are loaded
            client.start()
        kills = {"redis": 0, "s3": 0, "vllm": 0}
        end, killed = time.monotonic() + options.seconds, False
        while time.monotonic() < end and not any(client.problem for client in clients):
            time.sleep(chance.uniform(0.2, 3.0))
            if not killed and time.monotonic() > end - options.seconds / 2:
                killed = True  # once, as it takes long to start again
                instances[0].kill()
                instances[0].start()
                kills["vllm"] += 1
                continue
            which = "redis" if chance.random() < 0.6 else "s3"
            (redis.kill if which == "redis" else s3.stop)()
            time.sleep(chance.uniform(0.0, 2.0))
            (redis.start if which == "redis" else s3.start)()
            kills[which] += 1
        stop.set()
        for client in clients:
            client.join(LOADING)
            assert not client.is_alive(), "an instance hangs"
            if client.problem is not None:
                raise client.problem
        deadline = time.monotonic() + 60.0  # the one without a folder was never started anew
        while not clients[1].turn():
            assert time.monotonic() < deadline, "nothing is found remotely any more"
            time.sleep(0.5)
        for instance in instances:
            instance.kill()
    line = {
        "stress": "vllm faults",
        "kills": kills,
        "answers": sum(client.answers for client in clients),
        "wrong": 0,
        "interrupted": sum(client.interrupted for client in clients),
        "cached_tokens": sum(client.cached for client in clients),
        "slowest_s": round(max(instance.slowest for instance in instances), 2),
        "seed": options.seed,
        "seconds": options.seconds,
    }
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
