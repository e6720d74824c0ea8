"""API keys at rest, tenants' salts and limits; without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keepwarm.errors import ConfigError
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.settings import LimitsSection
from keepwarm.serving.tenancy.keys import add_key, read_keys, revoke_key
from keepwarm.serving.tenancy.tenants import LOCAL, Tenants


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_the_file_holds_hashes_for_its_owner_only(file: Path) -> None:
    key, text = add_key(file, "acme")
    assert text not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    ring = read_keys(file)
    assert ring.find(text) == key
    assert ring.find(text + "x") is None
    assert ring.find("kw-nobody-secret") is None
    assert ring.find("Bearer") is None
    assert "secret" not in repr(ring)
    revoke_key(file, key.id)
    assert read_keys(file).find(text) is None
    with pytest.raises(ConfigError, match="no key has the id"):
        revoke_key(file, key.id)


def test_a_file_that_others_can_read_or_that_is_no_keys_file_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="keepwarm keys add"):
        read_keys(file)
    add_key(file, "acme")
    os.chmod(file, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(file)
    os.chmod(file, 0o600)
    for text in ("{}", "[", json.dumps({"format": 99, "secret": "", "keys": []})):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_keys(file)


@pytest.mark.parametrize("tenant", ["", "Acme", "a/b", "../x", "a:b", "x" * 64])
def test_names_of_tenants(file: Path, tenant: str) -> None:
    with pytest.raises(ConfigError, match="tenant's name"):
        add_key(file, tenant)


def test_salts_are_the_servers_own_and_a_clients_only_narrows(file: Path) -> None:
    texts = [add_key(file, tenant)[1] for tenant in ("acme", "umbrella", "acme")]
    tenants = Tenants(file, LimitsSection(), file.parent)
    first, other, same = (tenants.caller(text) for text in texts)
    assert first.salt == same.salt
    assert first.salt != other.salt
    salts = {
        tenants.salt(caller, narrowed)
        for caller in (first, other)
        for narrowed in (None, "a", "b\nc\u2028d", first.salt)
    }
    assert len(salts) == 8
    assert tenants.salt(same, "a") == tenants.salt(first, "a")
    fresh = Tenants(file, LimitsSection(), file.parent)  # after a restart
    assert set(fresh.salts(first)) == set(tenants.salts(first))
    assert len(fresh.salts(first)) == 4
    with fresh.purging(first) as purged:
        assert set(purged) == set(tenants.salts(first))
    assert fresh.salts(first) == (first.salt,)


def test_without_keys_there_is_one_tenant_under_no_salt(tmp_path: Path) -> None:
    tenants = Tenants(None, LimitsSection(), tmp_path)
    caller = tenants.caller(None)
    assert (caller.tenant, caller.salt, caller.admin) == (LOCAL, None, True)
    assert tenants.caller("anything").tenant == LOCAL
    assert tenants.salt(caller, "mine") not in (None, "mine")


def test_a_key_that_is_missing_or_revoked_is_refused_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.serving.tenancy.tenants._LOOK_AGAIN", 0.0)
    key, text = add_key(file, "acme")
    tenants = Tenants(file, LimitsSection(), None)
    assert tenants.caller(text).tenant == "acme"
    for wrong in (None, "", "kw-x-y"):
        with pytest.raises(ApiError) as caught:
            tenants.caller(wrong)
        assert caught.value.kind == "authentication"
    revoke_key(file, key.id)
    with pytest.raises(ApiError):
        tenants.caller(text)
    _, new = add_key(file, "acme")
    assert tenants.caller(new).tenant == "acme"


def test_limits_and_quotas(file: Path) -> None:
    _, text = add_key(file, "acme", limits={"requests_per_minute": 2, "max_concurrent": 1, "tokens_per_day": 100})
    tenants = Tenants(file, LimitsSection(requests_per_minute=60), file.parent)
    caller = tenants.caller(text)
    tenants.enter(caller)
    with pytest.raises(ApiError, match="are running"):
        tenants.enter(caller)
    tenants.leave(caller)
    tenants.enter(caller)
    tenants.leave(caller)
    with pytest.raises(ApiError, match="requests_per_minute is 2") as caught:
        tenants.enter(caller)
    assert 0 < (caught.value.retry_after or 0) <= 30
    tenants.charge(caller, 60, 0, 60)
    with pytest.raises(ApiError, match="quota") as caught:
        tenants.enter(caller)
    assert caught.value.code == "insufficient_quota"
    tenants.save(now=True)
    again = Tenants(file, LimitsSection(), file.parent)
    assert again.usage(again.caller(text))["day_tokens"] == 120
    with pytest.raises(ApiError, match="quota"):
        again.enter(again.caller(text))
    with pytest.raises(ConfigError, match="unknown limit"):
        add_key(file, "acme", limits={"colour": 1})
