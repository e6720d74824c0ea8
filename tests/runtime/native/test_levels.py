"""Levels of instructions: which one a process takes, and that each computes rows that depend on nothing beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.emulated import EMULATED
from tests.helpers.lean import LENGTH, Lean, compiled, prompt

from keepwarm.core import levels
from keepwarm.core.blocks import token_ids
from keepwarm.core.levels import LEVELS, NATIVE, VARIABLE, Level, OpenMP, commands, library_name
from keepwarm.errors import ConfigError
from keepwarm.runtime.native import build

pytestmark = pytest.mark.host_memory("instructions are those of the processor")

SOURCES = Path(build.__file__).parent
HERE = build.levels_here()
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
X86 = [level for level in LEVELS if level.machine == "x86_64"]

COMPUTING = [*HERE, *EMULATED]
# They compile for themselves: no AVX; AVX without AVX2; AVX-512 without its byte instructions.
ODD = [
    replace(NATIVE, name=f"{NATIVE.name}-{name}", machine="x86_64", flags=(f"-march={name}",))
    for name in ("nehalem", "ivybridge", "knl")
]

needs_level = pytest.mark.skipif(not HERE or compiled is None, reason="no level here, or no C++ compiler")


# ---- which one ----


def test_a_level_has_what_lower_ones_have() -> None:
    """So the best one that a processor has is the first one that it has. AVX-512 does without AVX-VNNI, which many
    processors with it lack."""
    for machine in ("x86_64", "aarch64"):
        needs = [level.needs for level in levels.levels_of(machine)]
        assert all(better > lower - {"avx_vnni"} for better, lower in pairwise(needs))


@needs_level
def test_the_best_level_of_this_processor_is_taken_or_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert build.level() in HERE
    for level in HERE:
        monkeypatch.setenv(VARIABLE, level.name)
        assert build.level() == level
    monkeypatch.setenv(VARIABLE, "native")
    assert build.level().flags == NATIVE.flags


@pytest.mark.parametrize("name", ["sse9", "neon" if levels.machine() == "x86_64" else "avx2"])
def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigError, match=f"KEEPWARM_KERNELS is one of .*native.* got '{name}'"):
        build.level()


@pytest.mark.skipif(levels.machine() != "x86_64", reason="x86-64")
def test_a_level_that_the_processor_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: X86[-1].needs)
    assert build._level.__wrapped__("") == X86[-1]
    with pytest.raises(ConfigError, match="does not have: avx512; it has avx2, native"):
        build._level.__wrapped__("avx512")
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    assert build._level.__wrapped__("").name == "native", "an odd processor compiles for itself"


@needs_level
def test_a_compiler_that_does_not_know_the_best_level_gets_a_lower_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "g++"
    old.write_text(f'#!/bin/sh\ncase "$*" in *{HERE[0].flags[-1]}*) exit 1;; esac\nexec c++ "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(build, "DELIVERED", "nowhere")  # `make` put libraries beside the sources
    assert build._level.__wrapped__("") == [*HERE, NATIVE][1]


# ---- a wheel's libraries ----


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources as an installed wheel has them, with one library of the best level."""
    for source in (*SOURCES.glob("*.h"), build.WATCH):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(build, "_KERNELS", tmp_path / "kernels.cpp")
    watch, here = tmp_path / build.WATCH.name, [*HERE, NATIVE][0]
    to = tmp_path / levels.DELIVERED / here.name / library_name(watch, here, ())
    to.parent.mkdir(parents=True)
    for command in commands([*(build._compiler() or [])], watch, here, (), to, OpenMP()):
        subprocess.run(command, check=True)
    return watch


@needs_level
@pytest.mark.skipif(sys.platform != "linux", reason="wheels have libraries for Linux")
def test_a_wheels_library_needs_no_compiler_and_is_that_which_would_be_compiled(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, tmp_path: Path
) -> None:
    compiled_here = build.compiled_for(HERE[0], build.WATCH)
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = build.compiled_for.__wrapped__(build._level.__wrapped__(""), wheel)
    assert found is not None
    assert Path(found.library._name).parent == tmp_path / levels.DELIVERED / HERE[0].name
    assert compiled_here is not None
    assert found.digest == compiled_here.digest, "one compiler's bytes are the same, wherever it ran"
    assert found.library.keepwarm_sampled is not None


@needs_level
def test_a_wheels_library_of_other_sources_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wheel.write_text(wheel.read_text() + "\n// changed\n")
    monkeypatch.setenv("CXX", "no-such-compiler")
    build._tell_of_no_compiler.cache_clear()
    assert build.compiled_for.__wrapped__(HERE[0], wheel) is None
    assert "no C++ compiler" in caplog.text


@needs_level
def test_a_wheels_library_that_does_not_load_is_compiled(wheel: Path, caplog: pytest.LogCaptureFixture) -> None:
    (library,) = wheel.parent.glob(f"{levels.DELIVERED}/*/*.so")
    library.write_bytes(b"no library")
    assert build.compiled_for.__wrapped__(HERE[0], wheel) is not None
    assert "does not load" in caplog.text


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@needs_level
def test_kernels_call_no_function_that_computes() -> None:
    """Their digest is their arithmetic: what the system's libm returned would not be in it."""
    assert compiled is not None
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", compiled.library._name], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1].partition("@")[0] for line in said.splitlines()}
    allowed = r"_.*|GOMP_parallel|omp_get_.*|fegetenv|fesetenv|mem(cpy|move|set)|sched_(yield|getcpu|[gs]etaffinity)"
    assert not [name for name in names if not re.fullmatch(allowed, name)]


@pytest.mark.slow
@pytest.mark.parametrize("level", [*LEVELS, *ODD], ids=lambda level: level.name)
def test_every_source_compiles_for_each_level_and_for_processors_without_one(level: Level) -> None:
    compiler = "g++" if level.machine == levels.machine() else f"{level.machine.replace('_', '-')}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    for source, defines in levels.delivered(SOURCES, level):
        to_object, _ = commands([compiler], source, level, defines, Path("unused"), OpenMP(("-fopenmp",)))
        said = subprocess.run([*to_object, "-fsyntax-only"], capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{source.name} {defines}: {said.stderr}"


# ---- what each computes ----


@pytest.fixture(scope="module", params=[(n, d) for n in range(len(COMPUTING)) for d in (torch.float32, torch.bfloat16)])
def lean(request: pytest.FixtureRequest) -> Lean:
    number, dtype = request.param
    level: Level = COMPUTING[number]
    defines = levels.kernels_defines(level, in_blocks=False, adapters=False)
    return Lean("llama", dtype, build.compiled_for(level, build._KERNELS, *defines))


@needs_level
@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), threads=st.sampled_from([1, 2, 3]), seed=st.integers(0, 2))
def test_rows_of_each_level_depend_on_nothing_beside_them(
    lean: Lean, data: st.DataObject, threads: int, seed: int
) -> None:
    """Steps that end elsewhere, other numbers of threads, a token at a time, another sequence in the same step."""
    ids, whole, parts, beside = prompt(LENGTH, seed), lean.arena(), lean.arena(), lean.arena()
    cuts = data.draw(st.sets(st.integers(1, LENGTH - 12), max_size=5))
    logits = lean.run(ids, [], whole)
    lean.decoder.threads = threads
    try:
        assert torch.equal(lean.run(ids, [*sorted(cuts), *range(LENGTH - 10, LENGTH)], parts), logits)
        half = LENGTH // 2
        lean.run(ids[:half], [], beside)
        other = lean.arena()
        steps = [token_ids(prompt(50, 9)), token_ids(ids[half:])]
        places = [lean.sequenced(other), lean.sequenced(beside)]
        last = len(steps[0]) + len(steps[1]) - 1
        assert torch.equal(lean.decoder.step(steps, [0, half], places, [last]), logits)
    finally:
        lean.decoder.threads = None
    for a, *others in zip(whole.layers, parts.layers, beside.layers, strict=True):
        for b in others:
            assert torch.equal(a.keys[:, :, :LENGTH], b.keys[:, :, :LENGTH])  # type: ignore[index]
            assert torch.equal(a.values[:, :, :LENGTH], b.values[:, :, :LENGTH])  # type: ignore[index]


@needs_level
@pytest.mark.slow
def test_each_level_is_as_near_to_float64_as_transformers(lean: Lean) -> None:
    ids = prompt(LENGTH, 0)
    mine = lean.run(ids, [], lean.arena(), range(LENGTH)).double()
    reference = type(lean.model)(lean.model.config).double().eval()
    reference.load_state_dict({name: tensor.double() for name, tensor in lean.model.state_dict().items()})
    reference.config._attn_implementation = "eager"
    with torch.inference_mode():
        exact = reference(torch.tensor([ids])).logits[0]
        theirs = lean.model(torch.tensor([ids])).logits[0].double()
    assert (mine - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


# ---- without Python, for processors that are emulated ----


def _driven(folder: Path, compiler: str, level: Level, *before: str) -> None:
    """Compile a level's kernels and a program that tries them, and run it by the command `before`."""
    made: dict[str, Path] = {}
    for name, source, defines in (
        ("kernels", "kernels.cpp", levels.kernels_defines(level, in_blocks=False, adapters=False)),
        ("quantized", "kernels.cpp", levels.kernels_defines(level, in_blocks=True, adapters=False)),
        ("blocks", "blocks.cpp", ()),
    ):
        made[name] = folder / f"{name}.so"
        for command in commands([compiler], SOURCES / source, level, defines, made[name], OpenMP()):
            subprocess.run(command, check=True, timeout=500)
    drivers = {name: folder / name for name in ("plain", "in_blocks")}
    program = Path(__file__).with_name("levels_driver.cpp")
    flags = ["-std=c++17", "-O2", "-w", "-fopenmp", f"-I{SOURCES}", *level.flags]
    for name, driver in drivers.items():
        own = [*flags, f"-D{name.upper()}", str(program), "-o", str(driver), "-ldl"]
        subprocess.run([compiler, *own], check=True, timeout=120)
    for name, library, kind, *blocks in (
        ("plain", "kernels", "float32"),
        ("plain", "kernels", "bfloat16"),
        ("in_blocks", "quantized", "blocks", "blocks"),
    ):
        command = [*before, str(drivers[name]), str(made[library]), kind, *(str(made[each]) for each in blocks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, f"{kind}: {done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(EMULATOR) is None,
    reason="no cross compiler or no emulator of arm64 (apt install g++-aarch64-linux-gnu qemu-user)",
)
@pytest.mark.parametrize("level", levels.levels_of("aarch64"), ids=lambda level: level.name)
def test_kernels_for_arm64(tmp_path: Path, level: Level) -> None:
    _driven(tmp_path, CROSS, level, EMULATOR, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@needs_level
def test_the_program_finds_kernels_of_this_processor_right(tmp_path: Path) -> None:
    for level in (HERE[0], *EMULATED):
        _driven(tmp_path, "g++", replace(level, name="here"))
