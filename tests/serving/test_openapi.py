"""The OpenAPI document against the server: schemathesis makes requests of it, right ones and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks
from tests.serving.conftest import Keyed

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture
def api(keyed: Keyed) -> Any:
    config = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})  # thousands of requests
    return schemathesis.openapi.from_url(f"{keyed.url}/openapi.json", headers={"x-api-key": keyed.admin}, config=config)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_the_server_does_as_its_document_says(case: Any, keyed: Keyed) -> None:
    case.call_and_validate(headers={"x-api-key": keyed.admin}, checks=CHECKS, timeout=120)
