"""`keepwarm verify`, `gc`, `purge`, `export` and `import` over real stores that hold made-up KV."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.helpers.cli import Cli

from keepwarm.core.blocks import chain
from keepwarm.core.identity import salt_key
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace, prompt

KEY = bytes(range(32))


def filled(folder: Path, key: bytes | None = None) -> Path:
    """A store with a prompt named "schemas", and one under the salt "tenant" named "secret"."""
    with Archive.open(folder, max_ram=0, max_disk=1 << 24, key=key) as archive:
        for seed, name, salt in ((1, "schemas", None), (2, "secret", "tenant")):
            extra = {} if salt is None else {0: salt_key(salt)}
            blocks = chain(prompt(40, seed), [8, 16, 24, 32, 40], namespace(), extra)
            archive.put(MemoryKV.random(UNEVEN, 40, seed), blocks, namespace())
            archive.flush()
            archive.contents.name(name, blocks[-1].exact)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return filled(tmp_path / "store")


def names(cli: Cli, store: Path) -> list[str]:
    return sorted(entry["name"] for entry in cli("ls", "--store", store, "--json").json["entries"])


def test_verify_tells_sound_from_damaged_and_repairs(cli: Cli, store: Path) -> None:
    sound = cli("verify", "--store", store, "--json")
    assert (sound.code, sound.json["runs"], sound.json["damage"], sound.json["findings"]) == (0, 2, 0, [])
    assert "sound" in sound.err
    path = next((store / "runs").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for _ in range(2):
        damaged = cli("verify", "--store", store, "--json")
        assert (damaged.code, damaged.json["damage"]) == (6, 1)
        (found,) = damaged.json["findings"]
        assert (found["kind"], found["what"], found["damage"], found["repaired"]) == ("corrupt", path.stem, True, "")
    table = cli("verify", "--store", store)
    assert table.code == 6
    assert "checksum" in table.out
    assert "--repair" in table.err
    repaired = cli("verify", "--store", store, "--repair")
    assert repaired.code == 0
    assert "quarantined" in repaired.out
    assert cli("verify", "--store", store).code == 0


def test_gc_says_what_it_would_do_and_does_it(cli: Cli, store: Path) -> None:
    stray = store / "quarantine" / "stray"
    stray.write_bytes(bytes(5000))
    planned = cli("gc", "--store", store, "--dry-run", "--json").json
    assert (planned["counts"]["quarantined"], planned["freed"], planned["dry_run"]) == (1, 5000, True)
    assert stray.exists()
    done = cli("gc", "--store", store)
    assert done.code == 0
    assert "quarantined      1" in done.out
    assert "freed" in done.err
    assert not stray.exists()
    assert cli("gc", "--store", store, "--max-disk", "0", "--json").json["counts"]["evicted"] == 2
    assert names(cli, store) == []
    assert cli("gc", "--store", store, "--max-disk", "lots").code == 2


def test_purge_removes_one_tenant(cli: Cli, store: Path) -> None:
    assert cli("purge", "--store", store).code == 2
    assert names(cli, store) == ["schemas", "secret"]
    report = cli("purge", "--salt", "tenant", "--store", store, "--json")
    assert (report.json["runs"], report.json["names"]) == (1, 1)
    assert names(cli, store) == ["schemas"]
    assert b"secret" not in b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert cli("purge", "--salt", "tenant", "--store", store).out.startswith("0 runs and 0 names removed")


def test_purge_removes_all(cli: Cli, store: Path) -> None:
    assert cli("purge", "--all", "--salt", "tenant", "--store", store).code == 2
    assert cli("purge", "--all", "--store", store, "--json").json["names"] == 2
    assert names(cli, store) == []


def test_a_bundle_travels(cli: Cli, store: Path, tmp_path: Path) -> None:
    file, away = tmp_path / "schemas.bundle", tmp_path / "away"
    out = cli("export", "schemas", file, "--store", store, "--json").json
    assert (out["tokens"], out["names"], out["nbytes"]) == (40, ["schemas"], file.stat().st_size)
    done = cli("import", file, "--store", away)
    assert done.code == 0
    assert "40 tokens (schemas), 5 of 5 blocks were new" in done.out
    assert names(cli, away) == ["schemas"]
    assert cli("import", file, "--store", away, "--json").json["new_blocks"] == 0
    assert cli("export", "secret", file, "--store", store).code == 4
    file.write_bytes(file.read_bytes()[:-1])
    refused = cli("import", file, "--store", tmp_path / "third")
    assert refused.code == 4
    assert "nothing was imported" in refused.err
    assert cli("import", tmp_path / "none", "--store", away).code == 4


def test_a_signature_is_checked(cli: Cli, store: Path, tmp_path: Path) -> None:
    private, public, file = tmp_path / "private.pem", tmp_path / "public.pem", tmp_path / "bundle"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    cli("export", "schemas", file, "--store", store)
    refused = cli("import", file, "--store", tmp_path / "away", "--verify-key", public)
    assert (refused.code, "signed by nobody" in refused.err) == (4, True)
    assert "signed" in cli("export", "schemas", file, "--store", store, "--sign-key", private).out
    unchecked = cli("import", file, "--store", tmp_path / "away")
    assert "not checked" in unchecked.err
    assert cli("import", file, "--store", tmp_path / "away", "--verify-key", public).code == 0


def test_an_encrypted_store_asks_for_its_key(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, key = filled(tmp_path / "store", KEY), tmp_path / "key"
    key.write_text(KEY.hex())
    bundle = tmp_path / "bundle"
    commands = (
        ("ls",),
        ("show", "schemas"),
        ("verify",),
        ("gc",),
        ("purge", "--salt", "x"),
        ("export", "schemas", bundle),
        ("import", bundle),
    )
    for command in commands:
        refused = cli(*command, "--store", store)
        assert refused.code == 4, command
        assert "KEEPWARM_STORE_KEY" in refused.err or command[0] == "import"
        assert cli(*command, "--store", store, "--store-key-file", key).code == 0, command
    monkeypatch.setenv("KEEPWARM_STORE_KEY", KEY.hex())
    assert names(cli, store) == ["schemas", "secret"]
    for name, salted in (("schemas", False), ("secret", True)):
        shown = cli("show", name, "--store", store, "--json").json
        assert (shown["salted"], shown["encrypted"]) == (salted, True)
    monkeypatch.setenv("KEEPWARM_STORE_KEY", "nonsense")
    refused = cli("ls", "--store", store)
    assert (refused.code, "openssl rand -hex 32" in refused.err) == (2, True)


def test_looking_after_nothing_makes_no_store(cli: Cli, tmp_path: Path) -> None:
    for command in (("verify",), ("gc",), ("purge", "--salt", "x"), ("export", "name", tmp_path / "file")):
        result = cli(*command, "--store", tmp_path / "none")
        assert result.code == 4
        assert str(tmp_path / "none") in result.err
    assert list(tmp_path.iterdir()) == []
