"""What `make` runs before anything is installed: its steps, its bars, and the kernels beside them."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from keepwarm.core import levels
from tools import install

needs_gcc = pytest.mark.skipif(not install.gnu(["g++"]), reason="no GCC, or not on Linux")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_silent_step_is_drawn_all_the_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('Collecting things'); time.sleep(0.6)"]
    terminal = Terminal()
    with redirect_stderr(terminal):
        install.step(install.Shown(), "packages", command, tmp_path / "log", lambda last: None)
    drawn = terminal.getvalue().split(install.CLEAR)
    assert len({line.partition("━")[0] for line in drawn}) > 1  # the bar wanders
    assert "packages  done in" in drawn[-1]
    assert "Collecting things" in (tmp_path / "log").read_text()


def test_a_step_that_fails_shows_what_it_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(SystemExit) as ended:
        install.step(install.Shown(), "torch", command, tmp_path / "log", lambda last: None)
    assert ended.value.code == 3
    assert "no such package" in capsys.readouterr().err


def test_the_share_of_what_is_unpacked(tmp_path: Path) -> None:
    share = install.unpacked(tmp_path)
    (tmp_path / "pip-1.dist-info").mkdir()
    assert share("Collecting torch") is None
    assert share("Installing collected packages: a, b, c, d") == 0.0
    (tmp_path / "a-1.dist-info").mkdir()
    assert share("Installing collected packages: a, b, c, d") == 0.25


# ---- the environment ----


def making(venv: Path) -> subprocess.Popen[str]:
    """A process that makes an environment, when half of it is there."""
    begins = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path; "
    command = [sys.executable, "-c", f"{begins} from tools import install; install.environment(Path(sys.argv[1]))"]
    running = subprocess.Popen([*command, str(venv)], cwd=install.ROOT, stderr=subprocess.PIPE, text=True)
    while not (venv / "bin" / "python").exists():
        assert running.poll() is None
        time.sleep(0.01)
    return running


@pytest.mark.slow
def test_an_environment_that_was_broken_off_is_made_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    with making(venv) as running:
        running.send_signal(signal.SIGINT)
    assert not venv.exists()
    with making(venv) as running:
        running.kill()
    assert venv.exists()
    python = install.environment(venv)
    subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True)
    (venv / "mine").touch()
    assert install.environment(venv) == python
    assert (venv / "mine").exists()  # a whole one stays


# ---- torch's build ----


class Answering(BaseHTTPRequestHandler):
    """Where torch keeps its builds."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Linux on x86-64 without a GPU, pip as it is by default, and a server that has torch's builds."""
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(install, "GPU", tmp_path / "gpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(install, "CPU_BUILD", f"http://127.0.0.1:{server.server_port}")
        yield tmp_path
        server.shutdown()


def options(site: Path) -> list[str]:
    return install.torch_options(Path(sys.executable), site, install.Shown())


def test_without_a_gpu_torch_is_its_build_for_the_cpu(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options(plain) == ["--no-deps", "--index-url", install.CPU_BUILD]
    assert "TORCH=cuda" in capsys.readouterr().err
    monkeypatch.setenv("TORCH", "cuda")
    assert options(plain) == []
    (plain / "torch-2.0+cpu.dist-info").mkdir()
    assert options(plain) == []
    assert "make clean" in capsys.readouterr().err
    monkeypatch.setenv("TORCH", "rocm")
    with pytest.raises(SystemExit, match="rocm"):
        options(plain)


def test_a_gpu_and_an_index_of_the_users_are_left_alone(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install.GPU.touch()
    assert options(plain) == []
    install.GPU.unlink()
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://index.example/simple")
    assert options(plain) == []
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    (plain / "pip.conf").write_text("[install]\nindex-url = https://index.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(plain / "pip.conf"))
    assert options(plain) == []


def test_where_torchs_builds_do_not_answer_the_index_is_asked(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(install, "CPU_BUILD", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(install, "ASKING", 0.1)
        assert options(plain) == []
    assert "does not answer" in capsys.readouterr().err


# ---- kernels ----


@needs_gcc
def test_kernels_lie_where_those_of_a_wheel_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("kernels.cpp", "watch.cpp"):
        (tmp_path / name).write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(install, "SOURCES", tmp_path)
    monkeypatch.setattr(install, "BESIDE", ("watch.cpp",))
    made = install.Kernels()
    made.run()
    (folder,) = (tmp_path / levels.DELIVERED).iterdir()
    level = levels.level_named(folder.name, levels.machine())
    plain = levels.kernels_defines(level, in_blocks=False, adapters=False)
    names = {
        levels.library_name(tmp_path / "kernels.cpp", level, plain),
        levels.library_name(tmp_path / "watch.cpp", level, ()),
    }
    assert {file.name for file in folder.iterdir()} == names
    assert (made.did, made.all) == (2, 2)
    (tmp_path / "watch.cpp").write_text('extern "C" int two() { return 2; }')
    made = install.Kernels()
    made.run()
    assert (made.did, made.all) == (1, 1)
    assert len(list(folder.iterdir())) == 2  # what was made of earlier sources is gone


def test_it_starts_with_the_standard_library_alone() -> None:
    """No package is there when it begins: what it takes from Keepwarm, by path, needs none either."""
    begins = (
        "from tools import install; install.by_path('levels', 'core/levels.py'); "
        "install.by_path('processor', 'runtime/processor.py').cpu_flags()"
    )
    assert (
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {begins}"],
            cwd=install.ROOT,
            check=False,
        ).returncode
        == 0
    )
