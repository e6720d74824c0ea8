"""A GGUF file here and under llama.cpp (llama-cpp-python), paired: the same file, tokens and threads.

    python benchmarks/gguf_files.py FILE... [--peer PYTHON] [--output benchmarks/results]

`--peer` is a Python that has llama-cpp-python (this one if left out; without it only we are measured, and the output
says so). Writes `gguf.jsonl`: medians in ms of both and of their ratios (above 1: we are quicker). What is measured is
the bare forward pass in both, KV in place: `decode` one token after 1,000; `hit` 24 tokens after 1,000; `cold` 1,024
tokens. They are those of a text, ARCHITECTURE.md. Ours is asked for the largest logit alone, as a greedy answer asks
for it (kernels.md#heads); llama.cpp has no such way, and computes all. Both run in processes of their own and only one
at a time computes. `memory` is what loading adds to each process, in MiB (resident, files' pages left out); `logits`
compares both with the same weights in float32: the mean difference over the spread of logits, and how often the
likeliest token is the same.

    python benchmarks/gguf_files.py --make-q8 FROM TO      a Q8_0 file of another one's weights
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ratios import spread

PREFIX, QUESTION, COLD, COMPARED = 1000, 24, 1024, 32
PAUSE = 0.05  # seconds in which the other side's threads stop to spin
ROUNDS = {"decode": 25, "hit": 15, "cold": 3}
TEXT = Path(__file__).parents[1] / "ARCHITECTURE.md"


def ids_of(length: int, seed: int) -> list[int]:
    import random

    drawn = random.Random(seed)
    return [drawn.randrange(3, 40_000) for _ in range(length)]


def held() -> int:
    """Resident bytes of this process that are no file's pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class Ours:
    def __init__(self, file: str, threads: int) -> None:
        import torch

        from keepwarm.config import EngineConfig
        from keepwarm.runtime.arena.arena import Arena
        from keepwarm.runtime.device.host import HostPort
        from keepwarm.runtime.loader import load

        torch.set_num_threads(threads)
        before = held()
        self.loaded = load(file, EngineConfig.build())
        if self.loaded.runner.lean is None:
            raise SystemExit(f"{file} does not run on the compiled kernels here")
        self.lean = self.loaded.runner.lean
        self.arena = Arena(self.loaded.geometry, COLD + PREFIX, HostPort())
        self.memory = held() - before

    def text(self) -> list[int]:
        found: list[int] = self.loaded.tokenizer(TEXT.read_text())["input_ids"]
        return found

    def run(self, ids: list[int], start: int, what: str) -> None:
        import numpy as np

        tokens, largest = np.asarray(ids, dtype=np.int32), what != "logits"
        self.last = self.lean.step([tokens], [start], [self.arena.sequenced()], [len(ids) - 1], largest=largest)[0]

    def logits(self) -> list[float]:
        return self.last.float().tolist()

    def exact(self, ids: list[int]) -> list[list[float]]:
        """Logits after each token by the same weights in float32."""
        import torch

        with torch.inference_mode():
            return self.loaded.model(torch.tensor([ids])).logits[0].float().tolist()


class Theirs:
    def __init__(self, file: str, threads: int) -> None:
        import llama_cpp

        before = held()
        self.llama = llama_cpp.Llama(
            file, n_ctx=COLD + PREFIX, n_threads=threads, n_threads_batch=threads, verbose=False, use_mmap=False
        )
        self.memory = held() - before

    def run(self, ids: list[int], start: int, what: str) -> None:
        self.llama.n_tokens = start
        self.llama.eval(ids)

    def logits(self) -> list[float]:
        import ctypes

        import llama_cpp

        at = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
        return list(ctypes.cast(at, ctypes.POINTER(ctypes.c_float))[: self.llama.n_vocab()])


def serve(kind: str, file: str, threads: int) -> None:
    """Answer requests on standard input, one JSON line each."""
    side: Any = Ours(file, threads) if kind == "ours" else Theirs(file, threads)
    print(json.dumps({"memory": side.memory}), flush=True)
    for line in sys.stdin:
        what, start, ids = json.loads(line)
        if what in ("exact", "text"):
            print(json.dumps(side.exact(ids) if what == "exact" else side.text()), flush=True)
            continue
        time.sleep(PAUSE)
        began = time.perf_counter()
        side.run(ids, start, what)
        took = 1000 * (time.perf_counter() - began)
        print(json.dumps({"ms": took} | ({"logits": side.logits()} if what == "logits" else {})), flush=True)


class Side:
    def __init__(self, python: str, kind: str, file: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, __file__, "--serve", kind, str(file), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.memory = self._read()["memory"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit(f"{self._process.args} ended")

    def ask(self, what: str, start: int, ids: list[int]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([what, start, ids]), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def timed(sides: list[Side]) -> dict[str, Any]:
    found: dict[str, list[list[float]]] = {name: [] for name in ROUNDS}
    text = sides[0].ask("text", 0, [])

    def run(name: str, start: int, first: int, length: int) -> None:
        ids = text[first : first + length]
        found.setdefault(name, []).append([side.ask("run", start, ids)["ms"] for side in sides])

    run("warming", 0, 0, 64)
    for number in range(ROUNDS["cold"]):
        run("cold", 0, number, COLD)
    for number in range(ROUNDS["hit"]):
        run("hit", PREFIX, PREFIX + number, QUESTION)
    for number in range(ROUNDS["decode"]):
        run("decode", PREFIX + number, PREFIX + number, 1)
    del found["warming"]
    made: dict[str, Any] = {}
    for name, rows in found.items():
        made[name] = {"ours": statistics.median(row[0] for row in rows)}
        if len(sides) > 1:
            made[name] |= {"theirs": statistics.median(row[1] for row in rows)}
            made[name] |= spread([row[1] / row[0] for row in rows])
    return made


def compared(sides: list[Side]) -> dict[str, Any]:
    """Token by token after a text of likely tokens: ours and theirs against float32."""
    import numpy as np

    ids = ids_of(4, 77)
    for at in range(COMPARED):  # a text that the model itself goes on with
        last = sides[0].ask("logits", at if at < 4 else len(ids) - 1, [ids[at]] if at < 4 else ids[-1:])["logits"]
        if at >= 3:
            ids.append(int(np.argsort(last)[-1 - at % 2]))
    exact = np.array(sides[0].ask("exact", 0, ids))
    made = {}
    for name, side in zip(("ours", "theirs"), sides, strict=False):
        seen = np.array([side.ask("logits", at, [token])["logits"] for at, token in enumerate(ids)])
        made[name] = {
            "difference": float(np.abs(seen - exact).mean() / exact.std()),
            "same_token": float((seen.argmax(1) == exact.argmax(1)).mean()),
        }
        made[name + "_all"] = seen
    if len(sides) > 1:
        a, b = made["ours_all"], made["theirs_all"]
        made["between"] = {
            "difference": float(np.abs(a - b).mean() / exact.std()),
            "same_token": float((a.argmax(1) == b.argmax(1)).mean()),
        }
    return {name: value for name, value in made.items() if not name.endswith("_all")}


def make_q8(source: Path, target: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for each in reader.tensors:
        values = gguf.dequantize(each.data, each.tensor_type)
        if len(each.shape) > 1:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(each.name, gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(each.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--make-q8", nargs=2, type=Path, metavar=("FROM", "TO"))
    parser.add_argument("--no-logits", action="store_true")
    given = parser.parse_args()
    if given.make_q8:
        make_q8(*given.make_q8)
        return
    if given.serve:
        serve(given.serve, str(given.files[0]), given.threads)
        return
    has_peer = subprocess.run([given.peer, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    if not has_peer:
        print(f"{given.peer} has no llama-cpp-python: only Keepwarm is measured")
    for file in given.files:
        sides = [Side(sys.executable, "ours", file, given.threads)]
        if has_peer:
            sides.append(Side(given.peer, "theirs", file, given.threads))
        row: dict[str, Any] = {
            "file": file.name,
            "file_mib": file.stat().st_size / 2**20,
            "threads": given.threads,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "memory_mib": {name: side.memory / 2**20 for name, side in zip(("ours", "theirs"), sides, strict=False)},
            **timed(sides),
        }
        print(json.dumps(row), flush=True)
        if not given.no_logits:
            row["logits"] = compared(sides)
            print(json.dumps(row["logits"]), flush=True)
        for side in sides:
            side.close()
        if given.output is not None:
            with (given.output / "gguf.jsonl").open("a") as out:
                print(json.dumps(row), file=out)


if __name__ == "__main__":
    main()
