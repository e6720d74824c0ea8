"""deploy/kubernetes: this vLLM takes the options and settings of the manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.deploying import DEPLOY, built, containers, expanded, variables

pytest.importorskip("vllm")

FOLDERS = [DEPLOY / "kubernetes" / name for name in ("vllm", "overlays/vllm-redis", "overlays/vllm-s3")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_vllm_takes_the_options(folder: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (one,) = (one for one in built(folder) if one["kind"] == "StatefulSet")
    (container,) = containers(one)
    names = {each["name"] for each in container["env"]}
    known = variables(container)
    found = make_arg_parser(FlexibleArgumentParser()).parse_args([
        expanded(word, names, known) for word in container["args"]
    ])
    assert (found.port, found.block_size, found.shutdown_timeout) == (8000, 64, 60)
    assert found.enable_scale_out
    assert found.enable_prompt_tokens_details
    assert found.kv_transfer_config.kv_connector == "KeepwarmConnector"
    events = found.kv_events_config
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert events.endpoint == json.loads(known["KV_EVENTS_CONFIG"])["endpoint"]
