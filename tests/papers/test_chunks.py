"""The ten experiments, run for real on a tiny model, and the report of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.cli import interrupted
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import ConfigError
from papers.chunks import experiments, modes, quality, traffic
from papers.chunks.bench import Bench, Extent, documents, follow, rag, warm_documents
from papers.chunks.report import report
from papers.journal import Journal

pytestmark = pytest.mark.slow

SETTINGS = {"model": "m", "weights": "0", "dtype": "float32", "runs": 2, "quick": True, "seed": 0}
MACHINE = {"keepwarm": "0", "torch": "2", "threads": 1, "processor": "p", "python": "3"}
# one or two cases of each are enough to see that it measures what it tells
CASES = {
    "modes": ("RAG, another order after a new header",),
    "breakdown": ("off", "chunks, impact:0.13"),
    "sweep": ("64/16",),
    "quality": ("question 0", "passage 0", "far 0"),
    "workloads": ("chat", "server"),
    "memory": ("64", "break-even"),
    "features": ("features",),
    "chunkers": ("fixed", "content"),
    "traffic": ("zipf",),
    "rigor": ("system prompt", "flat TTFT", "equal outputs", "cold start"),
}


@pytest.fixture(scope="module")
def bench(tokenizer: Any) -> Any:
    with Engine.from_pretrained((tiny("llama", torch.float32), tokenizer), reuse="chunks") as engine:
        yield Bench(engine, Extent(2, quick=True))


@pytest.fixture(scope="module")
def points(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Journal:
    journal = Journal(tmp_path_factory.mktemp("chunks") / experiments.POINTS, experiments.KEYS)
    journal.begin(SETTINGS, MACHINE)
    cases = [
        (each, case)
        for each, case in experiments.left(experiments.EXPERIMENTS, bench.extent, journal)
        if case in CASES[each.name]
    ]
    assert len(list(experiments.measure(bench, cases, journal, lambda: True))) == sum(map(len, CASES.values()))
    return journal


def row(points: Journal, name: str, case: str) -> dict[str, Any]:
    return next(row for row in points.rows if (row["experiment"], row["case"]) == (name, case))


def test_what_is_measured_holds(points: Journal) -> None:
    moved = row(points, "modes", "RAG, another order after a new header")
    assert {mode: moved["labels"][mode] for mode in ("off", "exact", "chunks")} == {
        "off": "exact",
        "exact": "exact",
        "chunks": "blended",
    }
    assert moved["reused"]["chunks"] > 0.7
    assert moved["reused"]["off"] == 0
    assert row(points, "breakdown", "chunks, impact:0.13")["ms"]["repair"] > 0
    assert row(points, "sweep", "64/16")["shifted"] < 0.2 < row(points, "sweep", "64/16")["hit_rate"]
    question = row(points, "quality", "question 0")["repairs"]
    assert all(found["reused"] > 0.9 for found in question.values())
    assert question["impact:0.13"]["repaired"] == pytest.approx(0.13, abs=0.01)
    chunk = row(points, "memory", "64")
    assert chunk["ram_bytes"] >= chunk["theoretical_bytes"]
    assert chunk["ram_ms"] > 0
    assert chunk["disk_ms"] > 0
    assert chunk["naive_bytes"] == 2 * chunk["theoretical_bytes"]  # four heads, two of them for keys and values
    equal = row(points, "rigor", "equal outputs")
    assert equal["same"]["exact"] == equal["same"]["repaired in full"] == equal["of"]
    cold = row(points, "rigor", "cold start")
    assert (cold["first_reused"], cold["second_reused"] > 0.8) == (0, True)
    chunkers = {name: row(points, "chunkers", name)["hit_rate"] for name in ("fixed", "content")}
    assert chunkers["content"] > chunkers["fixed"]


def test_the_report_has_theirs_beside_ours(points: Journal, tmp_path: Path) -> None:
    peers = tmp_path / "peers.jsonl"
    about = {"kvboost": "0", "model": "m", "dtype": "float32", "threads": 1}
    line = {
        "peer": "kvboost",
        "kind": "selective",
        "case": "moved",
        "ttft_ms": 9.0,
        "told_ms": 1.0,
        "reused": 0.0,
        "agree": 0.5,
        "same": 1,
        "n": 2,
    }
    peers.write_text(f"{json.dumps(about)}\n{json.dumps(line)}\n")
    files = report(tmp_path, points, peers=peers, note="A note.")
    text = (tmp_path / "report.md").read_text()
    for each in experiments.EXPERIMENTS:
        assert f"## {each.number}. {each.title}" in text
    assert text.count("Published: KVBoost") + text.count("published: KVBoost") >= 10
    assert "A note." in text
    assert "selective" in text
    assert len([path for path in files if path.suffix == ".png"]) == 10
    assert all(path.exists() for path in files)
    assert "data:image/png" in (tmp_path / "report.html").read_text()


def test_it_goes_on_where_it_stopped(points: Journal) -> None:
    again = Journal(points.path, experiments.KEYS)
    left = experiments.left(experiments.EXPERIMENTS, Extent(2, quick=True), again)
    assert ("features", "features") not in {(each.name, case) for each, case in left}
    assert ("sweep", "128/0") in {(each.name, case) for each, case in left}


def test_experiments_are_chosen_by_number_or_name() -> None:
    assert [each.number for each in experiments.chosen(["4", "modes"])] == [1, 4]
    with pytest.raises(ConfigError, match="1 \\(modes\\)"):
        experiments.chosen(["11"])


def test_following_an_answer_is_generating_it(bench: Bench) -> None:
    chosen = documents()[:2]
    given = rag(chosen, "Why?", 1)
    with bench.engine() as engine:
        warm_documents(engine, chosen)
        for how in ({"reuse": "off"}, {"repair": "impact:0.15"}):
            greedy = follow(engine, given, 6, **how)
            assert greedy.ids == engine.generate(**given, max_new_tokens=6, **how).token_ids
            assert follow(engine, given, greedy.ids, **how).greedy == list(greedy.ids)


def test_traffic_is_drawn_as_it_is_named() -> None:
    drawn = {pattern: traffic.draw(pattern, 200, 0) for pattern in traffic.PATTERNS}
    counts = {name: [sum(which in chosen for chosen in found) for which in range(14)] for name, found in drawn.items()}
    assert counts["zipf"][0] > 2 * max(counts["uniform"])
    again = {name: sum(bool(set(a) & set(b)) for a, b in itertools.pairwise(found)) for name, found in drawn.items()}
    assert again["temporal"] > 2 * again["uniform"]


def test_sampling_distance(bench: Bench) -> None:
    found = quality.EXPERIMENT.measure(bench, "temperature 1.0")
    assert 0 <= found["first_token"] < 1
    assert 0 < found["chance"] <= 1


def test_workloads_ask_something_new_each_time() -> None:
    for case in modes.EXPERIMENT.cases(Extent()):
        _, request = modes.workload(case)
        assert request(1) != request(2)


def test_the_command_writes_what_it_measured(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from keepwarm.cli.app import main
    from papers.__main__ import app

    folder = saved("llama")
    arguments = ["chunks", "--model", str(folder), "--dtype", "float32", "--quick", "--experiments", "7"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output", str(tmp_path / "out"), "--json"], app)
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["points"] == 1
    assert (tmp_path / "out" / "report.md").exists()


def test_an_interrupted_experiment_says_how_it_goes_on(saved: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["chunks", "--model", saved("llama"), "--quick", "--out", tmp_path / "out"]
    said = interrupted(arguments, "1 of", tmp_path, "papers")
    assert "keepwarm: interrupted: " in said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
