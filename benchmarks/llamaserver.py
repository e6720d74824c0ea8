"""Time to first token of a llama-server behind `keepwarm slots`: cold, in a slot, and after a restart of the server.

    python benchmarks/llamaserver.py MODEL.gguf --program PATH/llama-server [--tokens 4000] [--rounds 5]
                                                [--out benchmarks/results/llamaserver.jsonl]

Each round begins with an empty store. A question on a long text is answered cold, and another one from the slot,
through `keepwarm slots` and straight. The server is started anew and asked the second question: after its own saved
file was restored by hand, and, after one more restart, through `keepwarm slots`. Straight and by hand, the slot has the
whole prompt by then, so one token is computed; else the question is. Answers are compared with the one from the slot,
with the log-probabilities of every token. Times are the client's, from the first byte sent to the first token of a
stream. Files are in the page cache, saved slots in memory. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from ratios import spread

QUESTIONS = ("\n\nWhich rule matters most here?", "\n\nWhat may never be done on a Monday, and who says so?")
NEW = 8
_WAIT = 120.0


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[None]:
    """A process, until it answers `url` and after that. Raises RuntimeError if it does not."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + _WAIT
        while True:
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


class Round:
    """One round's processes and records."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.slots = Path(tempfile.mkdtemp(dir=options.slots))
        self.port, self.front = free_port(), free_port()
        self.log: list[dict[str, Any]] = []

    def server(self) -> Any:
        threads = str(self.options.threads)
        command = [str(self.options.program), "--model", self.options.model, "--port", str(self.port)]
        command += ["--slot-save-path", str(self.slots), "--parallel", "2", "--cache-ram", "0", "--no-ui", "--offline"]
        command += ["--ctx-size", str(2 * (self.options.tokens + 1024)), "--threads", threads]
        return running(command, f"http://127.0.0.1:{self.port}/health", self.folder / "server.log")

    def keeping(self) -> Any:
        command = [sys.executable, "-m", "keepwarm.cli", "slots", "--server", f"http://127.0.0.1:{self.port}"]
        command += ["--slot-path", str(self.slots), "--store", str(self.folder / "store"), "--port", str(self.front)]
        return running(command, f"http://127.0.0.1:{self.front}/keepwarm/stats", self.folder / "keepwarm.log")

    def text(self) -> list[list[int]]:
        """Token ids of both prompts."""
        rules = (f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon." for n in range(1000))

        def ids(content: str) -> list[int]:
            asked = {"content": content, "add_special": False}
            got = httpx.post(f"http://127.0.0.1:{self.port}/tokenize", json=asked, timeout=60).json()["tokens"]
            return [int(each) for each in got]

        head = ids("\n".join(rules))[: self.options.tokens]
        return [head + ids(each) for each in QUESTIONS]

    def ask(self, case: str, port: int, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Ask, streamed, and note the time to the first token."""
        body = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "stream": True, "n_probs": 5} | more
        tokens: list[Any] = []
        first, last = 0.0, dict[str, Any]()
        began = time.perf_counter()
        with httpx.stream("POST", f"http://127.0.0.1:{port}/completion", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    if last.get("tokens") and not first:
                        first = time.perf_counter()
                    tokens.append(last.get("completion_probabilities"))
            restored = answer.headers.get("x-keepwarm-restored")
        record = {
            "case": case,
            "ttft_ms": 1000 * (first - began),
            "cached": last["timings"]["cache_n"],
            "restored": None if restored is None else int(restored),
            "answer": tokens,
        }
        self.log.append(record)
        return record

    def stored(self) -> None:
        """Wait until the first answer is in the store."""
        until = time.monotonic() + _WAIT
        while not (told := httpx.get(f"http://127.0.0.1:{self.front}/keepwarm/stats").json())["counts"].get("saves"):
            if time.monotonic() > until:
                logs = [(self.folder / f"{name}.log").read_text()[-4000:] for name in ("keepwarm", "server")]
                raise RuntimeError("\n".join(["nothing was saved", json.dumps(told), *logs]))
            time.sleep(0.05)

    def run(self) -> None:
        with self.server():
            with self.keeping():
                first, second = self.text()
                self.ask("warming up", self.port, first[:64], id_slot=1)
                self.ask("cold", self.front, first)
                began = time.perf_counter()
                self.stored()
                self.log.append({"case": "behind the answer", "ttft_ms": 1000 * (time.perf_counter() - began)})
                self.ask("in a slot", self.front, second)
                self.stored()
            self.ask("in a slot, straight, the same prompt again", self.port, second, id_slot=0)
            save = {"filename": "by-hand"}
            httpx.post(f"http://127.0.0.1:{self.port}/slots/0?action=save", json=save, timeout=60).raise_for_status()
        with self.server():
            self.ask("warming up", self.port, first[:64], id_slot=1)
            began = time.perf_counter()
            httpx.post(f"http://127.0.0.1:{self.port}/slots/0?action=restore", json=save, timeout=60).raise_for_status()
            took = 1000 * (time.perf_counter() - began)
            self.ask("restored by hand, after a restart, the same prompt again", self.port, second, id_slot=0)[
                "ttft_ms"
            ] += took
        with self.keeping(), self.server():  # the request is the first that `keepwarm slots` sends to this server
            self.ask("warming up", self.port, first[:64], id_slot=1)
            self.ask("after a restart", self.front, second)
        sizes = {"store": _size(self.folder / "store"), "by_hand": (self.slots / "by-hand").stat().st_size}
        self.log.append({"case": "bytes on disk"} | sizes)
        (self.slots / "by-hand").unlink()
        self.slots.rmdir()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def summary(options: argparse.Namespace, records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line per case, with ratios taken within each round."""
    cold = {each["round"]: each["ttft_ms"] for each in records if each["case"] == "cold"}
    answers = {each["round"]: each["answer"] for each in records if each["case"] == "in a slot"}
    timed = [each for each in records if "ttft_ms" in each and each["case"] != "warming up"]
    for case in dict.fromkeys(each["case"] for each in timed):
        found = [each for each in timed if each["case"] == case]
        times = [each["ttft_ms"] for each in found]
        line = {
            "case": case,
            "model": Path(options.model).stem,
            "tokens": options.tokens,
            "rounds": len(found),
            "ttft_ms": round(statistics.median(times), 1),
            "least_ms": round(min(times), 1),
            "most_ms": round(max(times), 1),
        }
        if "answer" in found[0] and case != "cold":
            ratios = [cold[each["round"]] / each["ttft_ms"] for each in found]
            line["cached"] = sorted({each["cached"] for each in found})
            line["times_sooner_than_cold"] = spread(ratios)
            line["answers_as_in_a_slot"] = sum(each["answer"] == answers[each["round"]] for each in found)
        yield line
    sizes = [each for each in records if each["case"] == "bytes on disk"]
    told = subprocess.run([options.program, "--version"], capture_output=True, text=True, check=True)
    yield {
        "case": "bytes on disk",
        "store": int(statistics.median(each["store"] for each in sizes)),
        "by_hand": int(statistics.median(each["by_hand"] for each in sizes)),
        "threads": options.threads,
        "llama_server": (told.stdout + told.stderr).splitlines()[0],
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--program", type=Path, required=True, help="llama-server")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--slots", type=Path, default=Path("/dev/shm"), help="where saved slots lie")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one = Round(options, Path(folder))
            one.run()
        records += [{"round": number} | each for each in one.log]
        print(json.dumps([(each["case"], round(each.get("ttft_ms", 0))) for each in one.log]), file=sys.stderr)
    lines = [json.dumps(line) for line in summary(options, records)]
    print("\n".join(lines))
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
