"""The dashboard asks for counters that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2 as httpx
from tests.helpers.processes import DEADLINE, chat
from tests.helpers.services import Keyed

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "keepwarm.json"


def test_every_series_of_the_dashboard_is_exported(keyed: Keyed) -> None:
    chat(keyed.url, "hi", {"x-api-key": keyed.acme}, model="tiny")
    chat(keyed.url, "hi", {"x-api-key": keyed.acme}, model="no such")
    text = httpx.get(f"{keyed.url}/metrics", headers={"x-api-key": keyed.admin}, timeout=DEADLINE).text
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    exported |= {f"{name}_bucket" for name in exported}
    wanted = set(re.findall(r"keepwarm_\w+", json.dumps(json.loads(DASHBOARD.read_text())["panels"])))
    assert wanted
    assert wanted <= exported
