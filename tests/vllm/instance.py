"""One vLLM instance in a process of its own: reads JSON lines from stdin, writes JSON lines to stdout.

The first line is `{"settings": {...of LLM...}, "store": {...of the connector, null: without it...}}`, with
`"events"`, a ZeroMQ endpoint, where KV events are published, and `"late"`: true for pages on a device that is as late
as it may be. Each other one is a step: `{"prompts": [[ids]],
"max_tokens": n, "salt": text or null, "adapter": folder or null, "together": bool, "scores": bool}`, `{"abort":
[ids]}`, `{"flush": true}` (what was handed to the store is in it then, and in remote tiers), `{"forget": true}` (vLLM's
own prefix cache, after the same), `{"shell": command}`, `{"sleep": seconds}`, or `{"metrics": beginning of their
names}`. With `"until": tokens` a step is repeated, at most ten times, each after `forget` and four seconds, until vLLM
says that so many were cached of each prompt. A step's line of results holds for each prompt the tokens that vLLM says
were cached, the answer's ids (and with `scores` their log-probabilities), and the seconds; for metrics their values by
name; null for other steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

MODULE = "keepwarm.integrations.vllm.connector"
LATE = "tests.vllm.late_connector"
FLUSHING = "tests.vllm.flushing.Flushing"


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    job = json.loads(sys.stdin.readline())
    settings = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "block_size": 32} | job["settings"]
    if job["store"] is not None:
        settings["worker_extension_cls"] = FLUSHING
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LateConnector" if job.get("late") else "KeepwarmConnector",
            kv_connector_module_path=LATE if job.get("late") else MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=job["store"],
        )
    if "events" in job:
        settings["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=job["events"]
        )
    llm = LLM(**settings)
    for line in sys.stdin:
        print(json.dumps(perform(llm, json.loads(line))), file=results, flush=True)


def perform(llm: Any, step: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    if "prompts" in step:
        scores = 0 if step.get("scores") else None
        sampling = SamplingParams(temperature=0, max_tokens=step["max_tokens"], logprobs=scores)
        found = generate(llm, step, sampling)
        for _ in range(10):
            if min(each["cached"] for each in found) >= step.get("until", 0):
                break
            time.sleep(4)
            forget(llm)
            found = generate(llm, step, sampling)
        return found
    if "shell" in step:
        subprocess.run(step["shell"], shell=True, check=True)
    elif "sleep" in step:
        time.sleep(step["sleep"])
    elif "metrics" in step:
        found = [metric for metric in llm.get_metrics() if metric.name.startswith(step["metrics"])]
        return {metric.name: metric.value for metric in found}
    elif "flush" in step:
        flush(llm)
    elif "forget" in step:
        forget(llm)
    elif "abort" in step:
        engine = llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": step["abort"]}, SamplingParams(max_tokens=500))
        for _ in range(3):
            engine.step()
        engine.abort_request(["aborted"])
    return None


def flush(llm: Any) -> None:
    if llm.llm_engine.vllm_config.kv_transfer_config is not None:
        llm.collective_rpc("flush_keepwarm")


def forget(llm: Any) -> None:
    flush(llm)
    for _ in range(100):  # pages of a request that ended are held until its last step
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
    raise AssertionError("vLLM's prefix cache is still in use")


def generate(llm: Any, step: dict[str, Any], sampling: Any) -> list[dict[str, Any]]:
    from vllm.lora.request import LoRARequest

    salt = {"cache_salt": step["salt"]} if step.get("salt") else {}
    prompts = [{"prompt_token_ids": ids} | salt for ids in step["prompts"]]
    adapter = None
    if step.get("adapter"):
        folder = Path(step["adapter"])
        adapter = LoRARequest(folder.name, zlib.crc32(folder.name.encode()) % 1000 + 1, str(folder))
    found = []
    for group in [prompts] if step.get("together") else [[prompt] for prompt in prompts]:
        started = time.perf_counter()
        for answer in llm.generate(group, sampling, use_tqdm=False, lora_request=adapter):
            seconds = time.perf_counter() - started
            ids = list(answer.outputs[0].token_ids)
            found.append({"cached": answer.num_cached_tokens, "ids": ids, "seconds": seconds})
            if step.get("scores"):
                each = zip(ids, answer.outputs[0].logprobs, strict=True)
                found[-1]["scores"] = [told[token].logprob for token, told in each]
    return found


if __name__ == "__main__":
    main()
