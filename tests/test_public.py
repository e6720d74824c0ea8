"""The public face: names others build on, and an import that stays light."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keepwarm
from keepwarm import errors

PUBLIC = {
    "AsyncEngine",
    "Batcher",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "Generation",
    "KeepwarmError",
    "Piece",
    "WarmReport",
    "__version__",
    "attach",
}

TREE = {
    "ConfigError": ("KeepwarmError", "ValueError"),
    "CannotListen": ("ConfigError",),
    "PromptError": ("KeepwarmError", "ValueError"),
    "EmptyPrompt": ("PromptError",),
    "PromptTooLong": ("PromptError",),
    "TemplateError": ("PromptError",),
    "ModelError": ("KeepwarmError",),
    "ModelNotFound": ("ModelError",),
    "UnsupportedModel": ("ModelError",),
    "DownloadError": ("ModelError",),
    "Overloaded": ("KeepwarmError",),
    "TookTooLong": ("KeepwarmError",),
    "PurgedMeanwhile": ("StoreError",),
    "StoreError": ("KeepwarmError",),
    "StoreNotWritable": ("StoreError",),
    "StoreTooNew": ("StoreError",),
    "StoreUnusable": ("StoreError",),
    "StoreLocked": ("StoreError",),
    "BundleError": ("StoreError",),
    "StoreFull": ("StoreError",),
    "CorruptRun": ("StoreError",),
    "StoreStalled": ("CorruptRun",),
    "RemoteUnavailable": ("StoreError",),
    "RemoteFull": ("RemoteUnavailable",),
}


def python(code: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_public_names() -> None:
    assert set(keepwarm.__all__) == PUBLIC
    assert keepwarm.__all__ == sorted(keepwarm.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'engin'"):
        _ = keepwarm.engin


def test_importing_keepwarm_loads_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'gguf', 'sqlite3', 'rich', 'typer'}"
    code = f"import sys, keepwarm; print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    assert python(code).strip() == "[]"


@pytest.mark.parametrize(
    "name", ["identity", "blocks", "geometry", "schedule", "spans", "plan", "ports", "reads", "results"]
)
def test_core_needs_numpy_at_most(name: str) -> None:
    heavy = "{'torch', 'transformers', 'safetensors', 'sqlite3', 'xxhash'}"
    code = f"import sys, keepwarm.core.{name}; print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    assert python(code).strip() == "[]"


def test_error_tree() -> None:
    defined = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(defined) == {*TREE, "KeepwarmError"}
    for name, bases in TREE.items():
        assert tuple(base.__name__ for base in defined[name].__bases__) == bases
    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in defined), "the tree at the top of errors.py draws them all"


def test_version_matches_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == keepwarm.__version__
