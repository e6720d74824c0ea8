"""What each KV codec costs and saves: size, perplexity, first-token divergence, and time to first token.

    python benchmarks/codecs.py quality [--model demo | PATH] [--passage 0 1 2 3] [--output benchmarks/results]
    python benchmarks/codecs.py ttft    [--model demo | PATH] [--rounds 7] [--output benchmarks/results]
    python benchmarks/codecs.py memory  [--model demo | PATH] [--rounds 7] [--tokens 2000 7000] [--output DIR]

All write lines of `codecs.jsonl`; those of one kind and model replace earlier ones.

`quality`: a passage's first 2,000 tokens are computed once; their KV is encoded and decoded, and the next 512 tokens
are read on it, the true text before each (teacher forcing). Perplexity is over those tokens, `kl_...` the divergence
of the distribution (of the first one, and of all on average) from that on raw KV, in nats, `top1_same` the share of
tokens whose likeliest successor stays the same. Passages are this repository's own prose and code.

`ttft`: from the call to the first token, for 2,000 stored tokens and 24 new ones: from RAM, from disk in page cache,
from disk with cold pages, and from a disk throttled to 200 MB/s (reads sleep for what such a disk would take).
Run it on an otherwise idle machine.

`memory`: a stored prefix of 2,000 and of 7,000 tokens, decoded when it is loaded (`kv_in_memory="decoded"`) and kept
encoded (`"encoded"`), each in a process of its own. `ram_tier` is what the RAM tier holds; `held` and `most` what the
process holds over the loaded model, as the system counts it, after hits and at most during one; then the time to the
first token for 24 and for 512 new tokens on the prefix in RAM, and of a decoded token. The logits of all conditions of
one codec are compared bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.codecs import codec
from keepwarm.core.request import Request
from keepwarm.runtime.codecs import TorchCodec
from keepwarm.runtime.loader import load
from keepwarm.store.runfile.codec import coded_geometry
from keepwarm.store.runfile.source import FileSource

LENGTHS = 2000, 7000  # of `memory`
MEANS = ("kl_first_token", "kl_mean", "top1_same")
CODECS = ("raw", "int8", "int4", "fp8")
PREFIX, CONTINUATION, SUFFIX = 2000, 512, 24
THROTTLE = 200e6  # bytes per second
ROOT = Path(__file__).parents[1]
PASSAGES = (
    ("prose", ("docs/decisions/0011-disk-layout.md", "docs/decisions/0014-lean-decoder.md", "ARCHITECTURE.md")),
    ("code", ("src/keepwarm/store/ram/tier.py",)),
    ("prose", ("README.md", "docs/decisions/0009-what-is-not-here-yet.md", "docs/decisions/0010-eviction.md")),
    ("code", ("src/keepwarm/models/generic.py",)),
)


def passages(engine: Engine, count: int) -> Iterator[tuple[str, list[int], str]]:
    for kind, files in PASSAGES[:count]:
        text = "\n\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        ids = engine.pipeline.tokenizer.encode(text)[0][: PREFIX + CONTINUATION]
        if len(ids) < PREFIX + CONTINUATION:
            raise ValueError(f"{files} have {len(ids)} tokens, {PREFIX + CONTINUATION} are needed")
        yield kind, ids, hashlib.sha256(text.encode()).hexdigest()[:16]


def on_codec(engine: Engine, arena: Any, name: str, raw: list[Any]) -> None:
    """Put the prefix's KV, through a codec, into an arena."""
    geometry, how = engine.pipeline.model.geometry, TorchCodec(codec(name)) if name != "raw" else None
    arena.seek(PREFIX)
    for layer, shape in enumerate(geometry.layers):
        for kv, dim in enumerate((shape.key_dim, shape.value_dim)):
            plain, target = raw[2 * layer + kv], arena.view(layer, kv, 0, PREFIX)
            if how is None:
                target[:] = plain
            else:
                how.decode(how.encode(plain, kv, dim, geometry.dtype), kv, dim, geometry.dtype, PREFIX, target)


def read_on(engine: Engine, arena: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities after the prefix's last token but one and every token of the continuation."""
    arena.seek(PREFIX - 1)
    given = torch.tensor([ids[PREFIX - 1 : -1]])
    places = torch.arange(PREFIX - 1, len(ids) - 1)[None]
    with torch.inference_mode():
        found = engine.pipeline.model.model(
            input_ids=given, position_ids=places, past_key_values=arena.cache, use_cache=True
        )
    return found.logits[0].float().log_softmax(-1)


def passage(name: str, number: int) -> dict[str, Any]:
    """One passage on every codec."""
    loaded = load(name, EngineConfig.build(dtype="bfloat16"))
    engine = Engine(loaded, EngineConfig.build(max_ram=0))
    kind, ids, digest = list(passages(engine, number + 1))[number]
    linked = engine.pipeline.linked(engine.pipeline.prompts.compile(Request(ids[:PREFIX]), CONTINUATION))
    rows: dict[str, dict[str, float]] = {}
    with engine.pipeline.lease(linked, engine.pipeline.config.reuse, PREFIX + CONTINUATION + 1) as placed:
        arena, tokens = placed.arena, linked.prompt.tokens
        for span in placed.plan.computes:
            engine.pipeline.model.runner.extend(tokens[span.start : span.end], arena.cache, span.start)
        planes = [(layer, kv) for layer in range(len(loaded.geometry.layers)) for kv in (0, 1)]
        raw = [arena.read(layer, kv, 0, PREFIX).copy() for layer, kv in planes]
        true = torch.tensor(ids[PREFIX:])
        for each in CODECS:
            on_codec(engine, arena, each, raw)
            found = read_on(engine, arena, ids)
            if each == "raw":
                reference = found
            rows[each] = {
                "loss": float(-found.gather(1, true[:, None]).double().sum()),
                "kl_first_token": float((reference[0].exp() * (reference[0] - found[0])).sum()),
                "kl_mean": float((reference.exp() * (reference - found)).sum(-1).mean()),
                "top1_same": float((reference.argmax(-1) == found.argmax(-1)).float().mean()),
            }
        arena.seek(0)
    sizes = {
        each: (loaded.geometry if each == "raw" else coded_geometry(loaded.geometry, codec(each), [PREFIX]))
        for each in CODECS
    }
    told = {"kind": f"passage {number}", "model": _name(name), "text": kind, "sha256": digest, "dtype": "bfloat16"}
    nbytes = {each: size.bytes_per_token * PREFIX for each, size in sizes.items()}
    return told | {"prefix": PREFIX, "tokens": len(true), "codecs": rows, "bytes": nbytes}


def quality(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """All passages of a model together."""
    tokens = sum(part["tokens"] for part in parts)
    loss = {each: sum(part["codecs"][each]["loss"] for part in parts) / tokens for each in CODECS}
    size = parts[0]["bytes"]
    rows = {
        each: {
            "bytes": size[each],
            "share_of_bf16": round(size[each] / size["raw"], 4),
            "perplexity": round(math.exp(loss[each]), 4),
            "change": round(math.exp(loss[each] - loss["raw"]) - 1, 5),
            **{name: round(statistics.fmean(part["codecs"][each][name] for part in parts), 6) for name in MEANS},
        }
        for each in CODECS
    }
    told = {"kind": "quality", "model": parts[0]["model"], "prefix": PREFIX, "tokens": tokens}
    return told | {"passages": len(parts), "codecs": rows}


@contextmanager
def throttled(active: bool) -> Iterator[None]:
    """Every read of a run takes as long as a disk of `THROTTLE` would, in the thread that reads."""
    plain = FileSource.fill

    def slow(source: FileSource, offset: int, buffers: list[memoryview]) -> None:
        size, started = sum(len(buffer) for buffer in buffers), time.perf_counter()
        plain(source, offset, buffers)
        # two threads read at once: each gets half
        time.sleep(max(0.0, 2 * size / THROTTLE - (time.perf_counter() - started)))

    FileSource.fill = slow if active else plain  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSource.fill = plain  # type: ignore[method-assign]


def cold_pages(store: Path) -> None:
    for file in (store / "runs").iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ttft(name: str, rounds: int) -> dict[str, Any]:
    loaded = load(name, EngineConfig.build(dtype="bfloat16"))
    pair = (loaded.model, loaded.tokenizer)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=ROOT) as work:
        engines = {}
        for each in CODECS:
            engine = Engine.from_pretrained(pair, kv_codec=each, reuse="prefix", store=Path(work) / each)
            ids = next(passages(engine, 1))[1]
            engine.warm(ids[:PREFIX])
            engine.flush()
            engines[each] = engine
        cold = statistics.median(
            engines["raw"].generate(ids[: PREFIX + SUFFIX], max_new_tokens=1, reuse="off").ttft_ms for _ in range(3)
        )
        times: dict[str, dict[str, list[tuple[float, float]]]] = {each: {} for each in CODECS}
        for number in range(rounds + 1):
            for each, engine in engines.items():  # in turn, so that all see the same machine
                for tier in ("ram", "disk", "cold disk", "slow disk"):
                    prompt = [*ids[:PREFIX], *ids[PREFIX + number : PREFIX + number + SUFFIX]]
                    engine.pipeline.pool.forget()
                    if tier == "ram":
                        engine.warm(ids[:PREFIX])
                        engine.flush()
                    else:
                        engine.pipeline.archive.clear_ram()
                    if "cold" in tier or "slow" in tier:
                        cold_pages(Path(work) / each)
                    with throttled(tier == "slow disk"):
                        result = engine.generate(prompt, max_new_tokens=1)
                    assert result.cached_tokens == PREFIX, result
                    assert set(result.cached_by_tier) == {tier.split()[-1]}, result.cached_by_tier
                    if number:
                        found = times[each].setdefault(tier, [])
                        found.append((result.ttft_ms, result.timings["load"]))
                    engine.flush()
        for each, engine in engines.items():
            size = sum(file.stat().st_size for file in (Path(work) / each / "runs").iterdir())
            rows[each] = {"file_bytes": size}
            for tier, found in times[each].items():
                rows[each][f"{tier} ttft ms"] = round(statistics.median(a for a, _ in found), 1)
                rows[each][f"{tier} load ms"] = round(statistics.median(b for _, b in found), 1)
            engine.close()
    return {
        "kind": "ttft",
        "model": _name(name),
        "dtype": "bfloat16",
        "prefix": PREFIX,
        "suffix": SUFFIX,
        "rounds": rounds,
        "cold_ms": round(cold, 1),
        "throttle_bytes_per_s": THROTTLE,
        "codecs": rows,
    }


def own() -> int:
    """Bytes of memory of this process's own that are in place: an arena's are shared memory to the system."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Most:
    """The most memory held while a block runs, looked at every two milliseconds."""

    def __enter__(self) -> Most:
        self.bytes, self._ended = own(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, own())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def in_memory(name: str, store: Path, each: str, kept: str, tokens: int, rounds: int) -> dict[str, Any]:
    """One condition, in this process. The store holds the prefix."""
    loaded = load(name, EngineConfig.build(dtype="bfloat16", kv_codec=each, reuse="prefix"))
    ids = long_ids(loaded.tokenizer, tokens + 512 + rounds)
    gc.collect()
    model = own()
    config = EngineConfig.build(store=store, kv_codec=each, kv_in_memory=kept, reuse="prefix", dtype="bfloat16")
    with Engine(loaded, config) as engine:

        def hit(fresh: int, new: int, at: int) -> Any:
            engine.pipeline.pool.forget()
            prompt = [*ids[:tokens], *ids[tokens + at : tokens + at + fresh]]
            result = engine.generate(prompt, max_new_tokens=new, trace=True)
            assert result.cached_tokens == tokens, result
            engine.flush()
            return result

        first = hit(24, 2, 0)
        assert set(first.cached_by_tier) == {"disk"}, first
        results = [hit(24, 1, at) for at in range(rounds + 1)][1:]
        assert set(results[0].cached_by_tier) == {"ram"}, results[0]
        wide = [hit(512, 1, at) for at in range(4)][1:]
        decoded = [hit(24, 33, at) for at in range(4)][1:]
        ram = engine.stats().bytes["ram"]
        engine.pipeline.pool.forget()
        del first
        gc.collect()
        held = own() - model
        with Most() as most:
            last = hit(24, 33, 0)
        return {
            "codec": each,
            "kv_in_memory": kept,
            "tokens": tokens,
            "raw_bytes": tokens * loaded.geometry.bytes_per_token,
            "ram_tier_bytes": ram,
            "held_bytes": held,
            "most_bytes": most.bytes - model,
            "ttft_24_ms": round(statistics.median(result.ttft_ms for result in results), 1),
            "ttft_512_ms": round(statistics.median(result.ttft_ms for result in wide), 1),
            "token_ms": round(statistics.median((r.total_ms - r.ttft_ms) / 32 for r in decoded), 2),
            "exactness": last.exactness,
            "logits": last.logits_digest,
        }


def long_ids(tokenizer: Any, count: int) -> list[int]:
    text = "\n\n".join((ROOT / file).read_text(encoding="utf-8") for _, files in PASSAGES for file in files)
    ids: list[int] = tokenizer(text)["input_ids"]
    return (ids * (count // len(ids) + 1))[:count]


def memory(name: str, rounds: int, lengths: list[int]) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT) as work:
        loaded = load(name, EngineConfig.build(dtype="bfloat16"))
        for tokens in lengths:
            ids = long_ids(loaded.tokenizer, tokens)
            for each in ("raw", "int8", "int4"):
                store = Path(work) / f"{each}-{tokens}"
                pair = loaded.model, loaded.tokenizer
                with Engine.from_pretrained(pair, kv_codec=each, reuse="prefix", store=store) as engine:
                    engine.warm(ids)
                for kept in ("decoded",) if each == "raw" else ("decoded", "encoded"):
                    child = subprocess.run(
                        [
                            sys.executable,
                            __file__,
                            "memory",
                            "--model",
                            name,
                            "--rounds",
                            str(rounds),
                            "--child",
                            json.dumps([str(store), each, kept, tokens]),
                        ],
                        stdout=subprocess.PIPE,
                        text=True,
                        check=True,
                    )
                    rows.append(json.loads(child.stdout.splitlines()[-1]))
                    print(json.dumps(rows[-1]), flush=True)
    for each in ("int8", "int4"):
        for tokens in lengths:
            found = {row["logits"] for row in rows if (row["codec"], row["tokens"]) == (each, tokens)}
            assert len(found) == 1, (each, tokens, found)
    return {"kind": "memory", "model": _name(name), "dtype": "bfloat16", "rounds": rounds, "rows": rows}


def _name(model: str) -> str:
    return "SmolLM2-135M-Instruct" if model == "demo" else Path(model).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "ttft", "memory"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--passage", type=int, nargs="+", default=list(range(len(PASSAGES))))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="memory: of the prefix")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.child:
        store, each, kept, tokens = json.loads(options.child)
        print(json.dumps(in_memory(options.model, Path(store), each, kept, tokens, options.rounds)))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "codecs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def put(row: dict[str, Any]) -> None:
        rows[:] = [each for each in rows if (each["kind"], each["model"]) != (row["kind"], row["model"])]
        rows.append(
            row | {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        )
        rows.sort(key=lambda each: (each["model"], each["kind"]))
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        print(json.dumps(row, indent=1), flush=True)

    if options.what == "ttft":
        put(ttft(options.model, options.rounds))
        return
    if options.what == "memory":
        put(memory(options.model, options.rounds, options.tokens))
        return
    for number in options.passage:
        put(passage(options.model, number))
    put(quality([row for row in rows if row["kind"].startswith("passage") and row["model"] == _name(options.model)]))


if __name__ == "__main__":
    main()
