"""The OpenAPI document against the server: schemathesis makes requests of it, right ones and wrong ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks
from tests.helpers.processes import ServerProcess
from tests.helpers.services import Keyed

from keepwarm.core.results import ChunkHit, Entry, Explanation, Miss
from keepwarm.serving.schemas.cache import ChunkShown, EntryShown, Explained
from keepwarm.serving.schemas.common import MissShown

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.mark.slow
def test_the_server_does_as_its_document_says(keyed: Keyed) -> None:
    check_document(keyed.url, {"x-api-key": keyed.admin}, examples=4)


@pytest.mark.slow
def test_so_does_one_with_the_embedded_model(tmp_path: Path) -> None:
    short = {"KEEPWARM__LIMITS__MAX_NEW_TOKENS": "16"}  # made-up wishes would be answered at full length
    server = ServerProcess("demo", tmp_path, environment=short).ready()
    try:
        check_document(server.url, {}, examples=2)
    finally:
        assert server.stop() == 0


def check_document(url: str, headers: dict[str, str], *, examples: int) -> None:
    config = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})  # thousands of requests
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers, config=config)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(headers=headers, checks=CHECKS, timeout=120)

        check()


def test_the_document_names_every_field_of_what_is_told() -> None:
    def named(record: Any) -> set[str]:
        return {field.name for field in fields(record)}

    assert set(MissShown.model_fields) == named(Miss) | {"stored_parts", "wanted_parts"}
    assert set(Explained.model_fields) == named(Explanation)
    assert set(ChunkShown.model_fields) == named(ChunkHit)
    assert set(EntryShown.model_fields) >= named(Entry)
