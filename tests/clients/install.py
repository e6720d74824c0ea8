"""Installs the clients, each from its package index at the versions of its lock file, in a folder of its own.

    python -m tests.clients.install FOLDER [NAME ...]

One that cannot be installed is left out: why is said, and kept in FOLDER/NAME.missing, which its test shows.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = Path(__file__).parent / "packages"
NODE = "node"  # Node.js itself, for clients that want a newer one than the machine has
NODE_WANTED = 22
_SECONDS = 900


class Failed(Exception):
    """Says why a client is not there."""


def install(name: str, folder: Path) -> None:
    """Install a client where it is not there already. Raises Failed."""
    source, target = PACKAGES / name, folder / name
    pinned = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(source.iterdir()))).hexdigest()
    done = target / "complete"
    if done.exists() and done.read_text() == pinned:
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    if (source / "package.json").exists():
        _npm(target)
    else:
        venv.create(target / "venv", with_pip=True)
        python = str(target / "venv" / "bin" / "python")
        _run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", "requirements.txt"], target
        )
    done.write_text(pinned)


def _npm(target: Path) -> None:
    if shutil.which("npm") is None:
        raise Failed("there is no npm (apt install npm)")
    # not `ci`: it fails where an optional part for another machine cannot be had
    _run(["npm", "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"], target)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(f"{' '.join(command[:3])} ended with {done.returncode}: {' '.join(told[-3:])[:300]}")


def node_is_old() -> bool:
    """Whether the machine has no Node.js, or one older than some clients want."""
    try:
        told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
        return int(told.strip().lstrip("v").partition(".")[0]) < NODE_WANTED
    except (OSError, subprocess.CalledProcessError, ValueError):
        return True


def main(folder: Path, names: list[str]) -> None:
    """Install what is named, or all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or sorted(path.name for path in PACKAGES.iterdir()):
        if name == NODE and not node_is_old():
            continue
        missing = folder / f"{name}.missing"
        missing.unlink(missing_ok=True)
        try:
            install(name, folder)
            print(f"{name}: installed")
        except Failed as error:
            missing.write_text(str(error))
            print(f"{name}: left out, {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
