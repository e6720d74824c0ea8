"""`stats --fleet`, `size --fleet` and bundles in object storage, from the command line."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.cli import Cli
from tests.helpers.remote_archives import PATIENT
from tests.helpers.remotes import S3Server, free_port, s3_server

from keepwarm.core.blocks import chain
from keepwarm.core.identity import salt_key
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

CAP = 1 << 24


def fill(*urls: str, folder: Path | None = None, name: str | None = None) -> list[bytes]:
    """Store a made-up prompt of 64 tokens, and leave counters as an engine does."""
    tokens = prompt(64)
    blocks = blocks_of(tokens)
    with Archive.open(folder, max_ram=CAP, max_disk=CAP, remotes=urls, limits=PATIENT) as archive:
        archive.remotes.report(lambda: {"requests": 2, "prompt_tokens": 100, "cached_tokens": 75})
        archive.put(MemoryKV.random(UNEVEN, 64), blocks, namespace())
        archive.flush()
        if name is not None:
            archive.contents.name(name, blocks[-1].exact)
    return [block.exact for block in blocks]


def test_stats_of_a_fleet_are_summed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/objects"
    fill(url)
    fill(url)
    found = cli("stats", "--fleet", "--remote", url, "--json").json
    assert (found["replicas"], found["live"]) == (2, 2)
    assert found["counters"] == {"requests": 4, "prompt_tokens": 200, "cached_tokens": 150}
    assert found["stored"]["runs"] == 1
    monkeypatch.setenv("KEEPWARM_REMOTE", url)
    shown = cli("stats", "--fleet")
    assert "75.0 % of prompt tokens" in shown.out


def test_stats_of_a_store(cli: Cli, tmp_path: Path) -> None:
    fill(folder=tmp_path / "store")
    assert cli("stats", "--store", tmp_path / "store").code == 0
    assert "counters" in cli("stats", "--store", tmp_path / "store", "--json").json


def test_a_purge_from_the_command_line_reaches_the_remote(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    tokens = prompt(64)
    blocks = chain(tokens, [32, 64], namespace(), {0: salt_key("tenant")})
    with Archive.open(tmp_path / "store", max_ram=CAP, max_disk=CAP, remotes=[url], limits=PATIENT) as archive:
        archive.put(MemoryKV.random(UNEVEN, 64), blocks, namespace())
    done = cli("purge", "--salt", "tenant", "--store", tmp_path / "store", "--remote", url)
    assert done.code == 0, done.err
    with Archive.open(None, max_ram=CAP, max_disk=CAP, remotes=[url], limits=PATIENT) as archive:
        assert archive.lookup([block.exact for block in blocks]) == ()


def test_a_fleet_that_is_not_named_or_not_there(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPWARM_REMOTE", raising=False)
    unnamed = cli("stats", "--fleet")
    assert unnamed.code == 2
    assert "KEEPWARM_REMOTE" in unnamed.err
    secret = "s3cr3t"
    gone = cli("stats", "--fleet", "--remote", f"redis://:{secret}@127.0.0.1:{free_port()}/")
    assert gone.code == 4
    assert secret not in gone.err


def test_the_break_even_is_where_loading_takes_as_long_as_computing(cli: Cli) -> None:
    found = cli("size", "llama-3.1-8b", "8000", "--fleet", "--prefill-speed", "4000", "--rate", "2", "--json").json
    fleet = found["fleet"]
    assert fleet["compute_seconds"] == 2.0
    assert fleet["break_even"] == found["bytes"] / 2.0
    assert fleet["bandwidth"] == 2 * found["bytes"]
    assert fleet["store_bytes"] == 100 * found["bytes"]
    for link in fleet["links"]:
        assert link["times_faster"] == pytest.approx(2.0 / link["seconds"])
    assert "break-even" in cli("size", "demo", "3000", "--fleet", "--prefill-speed", "2500").out
    for wrong in (["--fleet"], ["--prefill-speed", "5"]):
        assert cli("size", "demo", "3000", *wrong).code == 2


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.slow
def test_a_signed_bundle_goes_through_object_storage(cli: Cli, s3: S3Server, tmp_path: Path) -> None:
    url = s3.bucket("bundles").replace("/kv?", "/tools/support.kwb?")
    secret, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", secret], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", secret, "-pubout", "-out", public], check=True, capture_output=True)
    ids = fill(folder=tmp_path / "one", name="support")
    done = cli("export", "support", url, "--store", tmp_path / "one", "--sign-key", secret)
    assert done.code == 0, done.err
    assert "secret_access_key" not in done.out + done.err
    took = cli("import", url, "--store", tmp_path / "two", "--verify-key", public, "--json")
    assert took.code == 0, took.err
    assert took.json["signed"]
    with Archive.open(tmp_path / "two", max_ram=CAP, max_disk=CAP) as archive:
        assert len(archive.lookup(ids)) == len(ids)
        assert archive.contents.names() == {"support": ids[-1]}
    missing = cli("import", url.replace("support.kwb", "nothing"), "--store", tmp_path / "two")
    assert missing.code == 4
    assert "secret_access_key" not in missing.err
    assert cli("import", "http://host/file", "--store", tmp_path / "two").code == 2


def test_a_configuration_is_shown_without_passwords(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "keepwarm.toml"
    file.write_text(
        '[engine]\nremote = ["redis://user:s3cr3t@cache:6379/0", "s3://bucket/kv?secret_access_key=s3cr3t"]\n'
    )
    for option in ([], ["--json"]):
        done = cli("config", "check", "--config", file, *option)
        assert done.code == 0, done.err
        assert "redis://cache:6379/0" in done.out
        assert "s3cr3t" not in done.out


@pytest.mark.slow
def test_what_is_warmed_to_object_storage_once_makes_a_replica_hot(
    cli: Cli, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPWARM__ENGINE__REMOTE_TIMEOUT", "20")
    monkeypatch.setenv("KEEPWARM__ENGINE__REMOTE_LOAD_TIMEOUT", "20")
    url, system = s3.bucket("fleet"), "You answer for a library. " * 40
    warmed = cli("warm", "--system", system, "--to", url, "--store", tmp_path / "one", "--json")
    assert warmed.code == 0, warmed.err
    assert [each["where"] for each in warmed.json["remotes"]] == [url.partition("?")[0]]
    ask = "run", "Is it open today?", "--system", system, "--max-new-tokens", "2", "--store", tmp_path / "two", "--json"
    replica = cli(*ask, "--remote", url)
    assert replica.code == 0, replica.err
    assert replica.json["cached_by_tier"].keys() == {"s3"}
    assert replica.json["cached_tokens"] > 200
    assert replica.json["exactness"] == "exact"
    s3.stop()
    try:
        unsent = cli("warm", "--system", f"{system} And so on.", "--to", url, "--store", tmp_path / "one")
        assert unsent.code == 4
    finally:
        s3.start()
