"""`make bench-all`: results are kept of steps that end well, with their run told; what is there is not made again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import all as bench
from benchmarks.execution import alone, execute, stoppable
from benchmarks.inputs import APART
from benchmarks.peers import environments
from benchmarks.plan import PEERS, RESULTS, ROOT, STEPS, Step

WRITES = """
import pathlib, sys
out = pathlib.Path(sys.argv[1])
(out / "good.jsonl").write_text('{"ms": 1}\\n')
with (pathlib.Path(sys.argv[2]) / "times").open("a") as times:
    times.write("once\\n")
"""


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(("git", *who, *arguments), cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "writes.py").write_text(WRITES)
    (folder / ".gitignore").write_text("build/\n__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def here(repository: Path, tmp_path: Path) -> bench.Here:
    folders = (repository / "benchmarks" / "results", tmp_path / "scratch", tmp_path, tmp_path, tmp_path)
    return bench.Here(repository, git(repository, "rev-parse", "HEAD").strip(), False, *folders)


checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout of a repository")
GOOD = Step("good", ("{python} writes.py {out} {work}",), ("good.jsonl",), 1)


def times(here: bench.Here) -> int:
    return len((here.work / "times").read_text().splitlines())


def test_a_file_tells_its_run_and_is_not_made_again_from_the_same_code(here: bench.Here) -> None:
    assert bench.run([GOOD], here) == {}
    first, *rest = (here.results / "good.jsonl").read_text().splitlines()
    told = json.loads(first)["run"]
    assert told["commit"] == here.commit
    assert not told["dirty"]
    assert set(told["machine"]) == {"processor", "cores", "level", "memory_gib"}
    assert set(told["versions"]) == {"python", "torch", "transformers", "keepwarm"}
    assert told["command"] == GOOD.commands[0]
    assert rest == ['{"ms": 1}']
    assert bench.run([GOOD], here) == {}
    assert times(here) == 1


def test_results_and_documents_may_be_committed_between_two_runs_and_code_may_not(here: bench.Here) -> None:
    bench.run([GOOD], here)
    (here.root / "page.md").write_text("A page.")
    git(here.root, "add", ".")
    git(here.root, "commit", "-qm", "results")
    assert bench.done(replace(here, commit=git(here.root, "rev-parse", "HEAD").strip()), GOOD)
    (here.root / "code.py").write_text("pass")
    git(here.root, "add", ".")
    git(here.root, "commit", "-qm", "code")
    assert not bench.done(replace(here, commit=git(here.root, "rev-parse", "HEAD").strip()), GOOD)


def test_a_program_that_fails_may_be_mended_without_making_other_steps_again(here: bench.Here) -> None:
    folder = here.root / "benchmarks"
    (folder / "ttft.py").write_text(f"import sessions\n{WRITES}")
    (folder / "sessions.py").write_text("pass")
    (folder / "remote.py").write_text("pass")
    git(here.root, "add", ".")
    git(here.root, "commit", "-qm", "programs")
    step = replace(GOOD, commands=("{python} benchmarks/ttft.py {out} {work}",))

    def after(name: str) -> bench.Here:
        (folder / name).write_text("assert True")
        git(here.root, "commit", "-qam", "mended")
        return replace(here, commit=git(here.root, "rev-parse", "HEAD").strip())

    first = replace(here, commit=git(here.root, "rev-parse", "HEAD").strip())
    assert bench.run([step], first) == {}
    other = after("remote.py")
    assert bench.run([step], other) == {}
    told = bench.stamp_of(here.results / "good.jsonl")
    assert told is not None
    assert (times(here), told["commit"], told["ran"]) == (1, other.commit, first.commit)
    assert not bench.done(other, replace(step, commands=("{python} benchmarks/ttft.py {out} {work} more",)))
    assert not bench.done(after("sessions.py"), step), "the step's program imports it"


@pytest.mark.parametrize("folder", APART)
def test_folders_that_only_other_programs_use_may_differ(here: bench.Here, folder: str) -> None:
    file = here.root / folder.rstrip("*") / "code.py"
    file.parent.mkdir(parents=True)
    words = {*APART.values()}
    programs = {"uses.py": f"# {words}", "does_not.py": f"# {words - {APART[folder]}}"}
    for name, text in programs.items():
        (here.root / "benchmarks" / name).write_text(text)
    steps = [replace(GOOD, name=name, commands=(f"{{python}} benchmarks/{name}",)) for name in programs]
    commits = []
    for text in ("before", "after"):
        file.write_text(text)
        git(here.root, "add", ".")
        git(here.root, "commit", "-qm", text)
        commits.append(git(here.root, "rev-parse", "HEAD").strip())
    assert [bench.same_code(here.root, *commits, step) for step in steps] == [False, True]


def test_what_was_made_of_uncommitted_code_is_made_again(here: bench.Here) -> None:
    bench.run([GOOD], replace(here, dirty=True))
    assert json.loads((here.results / "good.jsonl").read_text().splitlines()[0])["run"]["dirty"]
    assert not bench.done(here, GOOD)


def test_a_step_that_fails_keeps_what_was_there_and_stops_no_other_one(here: bench.Here) -> None:
    (here.results / "bad.jsonl").write_text('{"of": "an earlier run"}')
    bad = Step("bad", ("{python} -c 'print(\"so it is\"); raise SystemExit(3)'",), ("bad.jsonl",), 1)
    silent = Step("silent", ("{python} -c pass",), ("silent.jsonl",), 1)
    lacking = replace(GOOD, name="lacking", needs=("model nobody-has-it",))
    short = replace(GOOD, name="short", files=("short.jsonl",), made="good.jsonl", holds=('"peer": "vllm"',))
    missing = bench.run([bad, silent, lacking, short], here)
    assert set(missing) == {"bad", "silent", "lacking", "short"}
    assert 'no "peer": "vllm"' in missing["short"]
    assert bench.run([GOOD], here) == {}
    assert "ended with 3" in missing["bad"]
    assert "wrote no silent.jsonl" in missing["silent"]
    assert "nobody-has-it" in missing["lacking"]
    assert "so it is" in (here.scratch / "bad.log").read_text()
    assert (here.results / "bad.jsonl").read_text() == '{"of": "an earlier run"}'
    assert not (here.results / "silent.jsonl").exists()
    assert not (here.results / "short.jsonl").exists()


def test_a_step_may_run_several_commands_over_many_files_and_keep_its_file_under_another_name(
    here: bench.Here, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"agent_{name}.json").write_text("{}")
    script = tmp_path / "counts.py"
    script.write_text("import sys; print([len(sys.argv)], file=open(sys.argv[1], 'a'))")
    command = f"{{python}} {script} {{out}}/x.jsonl"
    step = Step("two", (command, f"{command} {{traces}}/agent_*.json"), ("y.jsonl",), 1, made="x.jsonl")
    assert bench.run([step], here) == {}
    assert (here.results / "y.jsonl").read_text().splitlines()[1:] == ["[2]", "[4]"]


def test_a_step_that_never_ends_is_ended(here: bench.Here) -> None:
    with (here.work / "log").open("w") as log:
        assert execute(["sleep", "60"], here.root, os.environ, log, 0.1).startswith("ended after")


LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux tells the environment of processes")
def test_what_a_step_leaves_running_in_another_session_is_ended(here: bench.Here) -> None:
    with (here.work / "log").open("w+") as log:
        assert execute([sys.executable, "-c", LEAVES], here.root, os.environ, log, 30) == ""
        log.seek(0)
        left = Path("/proc") / log.read().split()[-1] / "stat"
    until = time.monotonic() + 10
    while left.exists() and left.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not left.exists() or left.read_text().split()[2] == "Z"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(SystemExit, match="another run is under way"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_a_signal_ends_a_run_so_that_its_step_is_ended_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stoppable(), pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_while_which_the_code_was_changed_is_not_kept(here: bench.Here) -> None:
    step = replace(GOOD, commands=(*GOOD.commands, """{python} -c 'open("writes.py", "a").write("#")'"""))
    assert "was changed while it ran" in bench.run([step], here)["good"]


@pytest.mark.parametrize("what", ["machine", "versions"])
def test_results_of_another_machine_or_of_other_versions_are_made_again(here: bench.Here, what: str) -> None:
    bench.run([GOOD], here)
    file = here.results / "good.jsonl"
    first, rest = file.read_text().split("\n", 1)
    told = json.loads(first)
    told["run"][what] = {"another": "one"}
    file.write_text(json.dumps(told) + "\n" + rest)
    assert not bench.done(here, GOOD)
    file.write_text("{no JSON")
    assert not bench.done(here, GOOD)


def test_a_step_that_breaks_in_any_way_stops_no_other_one(here: bench.Here) -> None:
    broken = replace(GOOD, name="broken", commands=("{nobody}",))
    assert set(bench.run([broken, GOOD], here)) == {"broken"}


def test_uncommitted_code_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "writes.py").write_text("changed")
    (repository / "benchmarks" / "results" / "new.jsonl").write_text("{}")  # results are no code
    assert bench.main(["--only", "ttft"], repository) == 2
    said = capsys.readouterr().err
    assert "writes.py" in said
    assert "new.jsonl" not in said


@checkout
def test_the_plan_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step ")
    assert all(step.name in said for step in STEPS)
    with pytest.raises(SystemExit, match="no step is named nobody"):
        bench.main(["--only", "nobody"])


# ---- the plan itself ----


def test_the_plan_ends_in_under_three_hours_and_makes_each_file_once() -> None:
    assert sum(step.minutes for step in STEPS) < 155
    files = [name for step in STEPS for name in step.files]
    assert len(files) == len(set(files))
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_each_environment_of_the_plan_can_be_made() -> None:
    assert set(PEERS) <= set(environments.MAKERS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_files_that_are_there_hold_what_they_must(step: Step) -> None:
    text = "".join((RESULTS / name).read_text(encoding="utf-8") for name in step.files)
    assert [each for each in step.holds if each not in text] == []


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_names_what_there_is(step: Step) -> None:
    names = {"python", "out", "work", "models", "traces", "demo"}
    peers = [need.removeprefix("peer ") for need in step.needs if need.startswith("peer ")]
    assert set(peers) <= set(PEERS)
    for command in step.commands:
        assert set(re.findall(r"\{(\w+)\}", command)) <= names | {peer.replace("-", "_") for peer in peers}
        for script in re.findall(r"\b(?:benchmarks|tests)/\S+\.py", command):
            told = (ROOT / script).read_text(encoding="utf-8")
            unknown = [
                option for option in re.findall(r" (--[a-z-]+)", f"{command} {step.quick}") if option not in told
            ]
            assert unknown == [], script
        for model in re.findall(r"\{models\}/(\S+)", command):
            assert f"model {model}" in step.needs


@checkout
@pytest.mark.slow
def test_a_real_step_ends_with_its_file(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    asked = [{"timestamp": n, "input_length": 1024, "output_length": 8, "hash_ids": [0, n % 3]} for n in range(20)]
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        (traces / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    command = ["--quick", "--only", "simulate", "--results", str(tmp_path), "--traces", str(traces)]
    assert bench.main(command) == 0
    first, *rest = map(json.loads, (tmp_path / "simulate.jsonl").read_text().splitlines())
    assert first["run"]["machine"]["cores"]
    assert {row["trace"] for row in rest} == {"mooncake_conversation", "mooncake_synthetic"}
