"""`keepwarm size`: how large a model's KV state is, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import Json
from keepwarm.config import SCHEDULED_STEP, SNAPSHOT_BUDGET
from keepwarm.core.geometry import ITEMSIZE, KVGeometry, geometry_of, naive_bytes_per_token
from keepwarm.core.kinds import layer_kinds, text_config
from keepwarm.core.snapshots import affordable
from keepwarm.core.states import snapshot_size, stateful_layers
from keepwarm.errors import ConfigError, ModelNotFound
from keepwarm.models.hub_gguf import downloaded_gguf, names_hub_gguf
from keepwarm.models.places import cached_config, gguf_file
from keepwarm.models.presets import preset

_DEMO = "smollm2-135m"
_LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "25 Gbit/s": 2.5e10, "100 Gbit/s": 1e11, "400 Gbit/s": 4e11}


def size(
    model: Annotated[
        str, typer.Argument(help="A configuration's name, a hub id, a folder with config.json, a GGUF file, or 'demo'.")
    ],
    tokens: Annotated[int, typer.Argument(min=1, help="Length of the prompt.")] = 1000,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="dtype of the KV. [default: the configuration's; `run` and `serve` may compute in another]"
        ),
    ] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Also size a fleet's shared store: space, bandwidth, break-even speed.")
    ] = False,
    prefill_speed: Annotated[
        float | None, typer.Option("--prefill-speed", min=0.001, help="Tokens per second that a replica prefills.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Distinct prompts that stay warm. [default: 100]")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.0, help="Hits per second from the shared store, fleet-wide. [default: 1]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the bytes of KV state per token and per prompt, and what 2·layers·d_model·bytes would give.

    For a model with recurrent state, also show the size of a snapshot and how many a prompt may have. docs/models.md
    lists which classes are cached.

    With --fleet: loading over the network pays if it is faster than the break-even speed, at which a token's KV arrives
    in the time that a replica needs to compute it.
    """
    if not fleet and any(given is not None for given in (prefill_speed, prompts, rate)):
        raise ConfigError("--prefill-speed, --prompts and --rate belong to --fleet")
    if fleet and prefill_speed is None:
        raise ConfigError("--fleet needs --prefill-speed: tokens per second, as `keepwarm bench` or your engine says")
    if dtype is not None and dtype not in ITEMSIZE:
        raise ConfigError(f"--dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    config = _config(model)
    geometry = geometry_of(config, dtype)
    naive = naive_bytes_per_token(config, geometry.dtype)
    stored, loaded = geometry.stored_bytes(tokens, SCHEDULED_STEP), geometry.loaded_bytes(tokens)
    state = _state(config, geometry, tokens)
    report = {
        "model": model,
        "dtype": geometry.dtype,
        "tokens": tokens,
        "bytes_per_token": geometry.bytes_per_token,
        "bytes": stored,
        "loaded_bytes": loaded,
        "layers": _layers(geometry),
        "layers_without_kv": sum(kind in ("stateful", "none") for kind, _ in layer_kinds(config)),
        "state": state,
        "naive_bytes_per_token": naive,
        "naive_bytes": naive * tokens,
        "overestimate": naive * tokens / stored if geometry.layers else None,
        "why": _why(config, geometry, stored == naive * tokens, tokens),
        "note": str(config.get("note", "")),
    }
    shared = None
    if prefill_speed is not None:
        rate = 1.0 if rate is None else rate
        kept, loaded = _weights(stored, loaded, state or {})
        shared = _fleet(loaded, kept, tokens, prefill_speed, prompts or 100, rate)
    if as_json:
        output.print_json(report | ({} if shared is None else {"fleet": shared}))
        return
    _print(report)
    if shared is not None:
        _print_fleet(shared)


def _weights(stored: int, loaded: int, state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes that a prompt keeps, with the most snapshots it may have, and those a hit loads, with one."""
    snapshot = state.get("bytes") or 0
    if not stored + snapshot:
        raise ConfigError("--fleet needs to know what a prompt weighs, which this configuration does not tell")
    return stored + (state.get("most_bytes") or 0), loaded + snapshot


def _fleet(nbytes: int, kept: int, tokens: int, prefill_speed: float, prompts: int, rate: float) -> dict[str, Any]:
    """Return what replicas need of a shared store that keeps `kept` bytes per prompt and loads `nbytes` per hit."""
    compute = tokens / prefill_speed
    links = {name: bits / 8 for name, bits in _LINKS.items()}
    return {
        "prompts": prompts,
        "store_bytes": prompts * kept,
        "rate": rate,
        "bandwidth": rate * nbytes,  # bytes per second that the store must give
        "compute_seconds": compute,
        "break_even": nbytes / compute,  # bytes per second
        "links": [
            {"link": name, "seconds": nbytes / speed, "times_faster": compute * speed / nbytes}
            for name, speed in links.items()
        ],
    }


def _print_fleet(found: Mapping[str, Any]) -> None:
    rows = [
        ("store", f"{output.in_bytes(found['store_bytes'])} for {found['prompts']:,} distinct prompts of this length"),
        ("bandwidth", f"{_speed(found['bandwidth'])} out of the store for {found['rate']:g} hits per second"),
        ("computing", f"{found['compute_seconds']:.3g} s per prompt on a replica"),
        ("break-even", f"{_speed(found['break_even'])} to a replica: slower, and computing is faster than loading"),
    ]
    print()
    output.print_fields(rows)
    print()
    cells = [(e["link"], f"{e['seconds']:.3g} s", f"{e['times_faster']:.2g} x") for e in found["links"]]
    output.print_table(("network", "one prompt", "against computing"), cells, right=(1, 2))


def _speed(bytes_per_second: float) -> str:
    return f"{8 * bytes_per_second / 1e9:.3g} Gbit/s ({output.in_bytes(round(bytes_per_second))}/s)"


def _config(model: str) -> Mapping[str, Any]:
    """The configuration behind a path or a name. Raises ModelNotFound."""
    path = Path(model).expanduser()
    if (found := gguf_file(model) or downloaded_gguf(model)) is not None:
        from keepwarm.runtime.gguf.file import File  # imports torch

        return File.open(found).config().to_dict() | {"dtype": "bfloat16"}
    if names_hub_gguf(model):
        raise ModelNotFound(f"{model} was not downloaded yet: `keepwarm run` or `serve` does that; or pass its file")
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ModelNotFound(f"{file} is not a readable JSON configuration: {error}") from None
        if not isinstance(config, dict):
            raise ModelNotFound(f"{file} is not a configuration: expected a JSON object, got {type(config).__name__}")
        return config
    try:
        return preset(_DEMO if model == "demo" else model)
    except ModelNotFound as error:
        if (cached := cached_config(model)) is not None:
            return _config(str(cached))
        raise ModelNotFound(f"{error}; or pass 'demo' or a folder with a config.json") from None


def _layers(geometry: KVGeometry) -> list[dict[str, Any]]:
    """Runs of equal layers (those that keep KV), in order."""
    result = []
    for layer, run in groupby(geometry.layers):
        result.append({
            "layers": len(list(run)),
            "kv_heads": layer.kv_heads,
            "key_dim": layer.key_dim,
            "value_dim": layer.value_dim,
            "window": layer.window,
            "bytes_per_token": layer.elements() * geometry.itemsize,
        })
    return result


def _state(config: Mapping[str, Any], geometry: KVGeometry, tokens: int) -> dict[str, Any] | None:
    """Return the size of one snapshot of a model's recurrent state, and how many a prompt has at most by default.
    `bytes` is None where the configuration does not tell. Return None for a model without recurrent state."""
    if not (layers := stateful_layers(config)):
        return None
    found = snapshot_size(config, geometry.dtype)
    if found is None:
        return {"layers": layers, "kind": None, "bytes": None, "tokens": None, "most": None, "most_bytes": None}
    most = affordable(tokens, geometry.stored_bytes(tokens, SCHEDULED_STEP) // tokens, found.nbytes, SNAPSHOT_BUDGET)
    return {
        "layers": layers,
        "kind": found.family,
        "bytes": found.nbytes,
        "tokens": found.tokens(geometry.bytes_per_token),  # whose KV has as many bytes
        "most": most,
        "most_bytes": most * found.nbytes,
    }


def _state_text(state: Mapping[str, Any]) -> str:
    layers = f"{state['layers']} layer{'' if state['layers'] == 1 else 's'}"
    if state["bytes"] is None:
        return f"{layers} with a recurrent state, whose size this configuration does not tell; loading the model does"
    text = f"{state['bytes']:,} bytes ({output.in_bytes(state['bytes'])}) of {layers} ({state['kind']})"
    return text + (f", as much as the KV of {state['tokens']:,.0f} tokens" if state["tokens"] else "")


def _why(config: Mapping[str, Any], geometry: KVGeometry, cancels: bool, tokens: int) -> str:
    """Say in one line why the simple formula is wrong for this model's KV, or that it is right."""
    config = text_config(config)
    heads = config.get("num_attention_heads") or config.get("n_head") or config.get("num_heads")
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model")
    kinds = [kind for kind, _ in layer_kinds(config)]
    stateful, hybrid, none = kinds.count("stateful"), kinds.count("hybrid"), kinds.count("none")
    parts = []
    if not geometry.layers:
        return "its layers keep a recurrent state and no KV: a prompt of any length weighs what its snapshots do"
    if isinstance(heads, int) and (kv_heads := {layer.kv_heads for layer in geometry.layers}) != {heads}:
        count = f"{min(kv_heads)} to {max(kv_heads)}" if len(kv_heads) > 1 else str(next(iter(kv_heads), 0))
        parts.append(f"{heads} query heads share {count} key/value head{'' if count == '1' else 's'}")
    if isinstance(heads, int) and (odd := {x.key_dim for x in geometry.layers if heads * x.key_dim != hidden}):
        parts.append(f"heads are {max(odd)} wide, so {heads} of them are not d_model = {hidden}")
    if any(layer.window is not None and layer.window < tokens for layer in geometry.layers):
        parts.append(
            f"of a windowed layer a step of {SCHEDULED_STEP:,} tokens keeps what is attended to from its end on"
        )
    if stateful:
        parts.append(f"{output.counted(stateful, 'layer')} with a recurrent state and no KV")
    if hybrid:
        parts.append(f"{output.counted(hybrid, 'layer')} with a recurrent state beside KV")
    if none:
        parts.append(f"{output.counted(none, 'layer')} without either")
    if "indexed" in kinds:
        parts.append("index keys are a third tensor per token")
    if not parts:
        return "2·layers·d_model·bytes is right here: every query head has a key/value head of its own"
    end = " (and the differences cancel out)" if cancels else ""
    formula = "2·layers·d_model·bytes takes one key/value head per query head, together d_model wide"
    return f"{formula}; {'; '.join(parts)}{end}"


def _print(report: Mapping[str, Any]) -> None:
    tokens, layers = report["tokens"], report["layers"]
    total = sum(run["layers"] for run in layers)
    rows = [
        ("model", f"{report['model']}, KV in {report['dtype']}"),
        ("per token", f"{report['bytes_per_token']:,} bytes ({output.in_bytes(report['bytes_per_token'])})"),
        (f"{tokens:,} tokens", f"{report['bytes']:,} bytes ({output.in_bytes(report['bytes'])})"),
    ]
    if report["loaded_bytes"] < report["bytes"]:
        rows.append(("a hit loads", f"{report['loaded_bytes']:,} bytes ({output.in_bytes(report['loaded_bytes'])})"))
    if len(layers) == 1:
        rows.append(("layers", f"{total} x {_layer(layers[0])}"))
    if report["state"] is not None:
        rows.append(("snapshot", _state_text(report["state"])))
        if (most := report["state"]["most"]) is not None:
            beside = report["state"]["most_bytes"]
            rows.append((
                "snapshots",
                f"{most} at most along a prompt of this length (snapshot_budget={SNAPSHOT_BUDGET:g}): "
                f"{output.in_bytes(beside)}, with the KV {output.in_bytes(report['bytes'] + beside)}",
            ))
    times = "" if report["overestimate"] is None else f", {report['overestimate']:.3g} times the real size"
    rows.append((
        "naive formula",
        f"{report['naive_bytes_per_token']:,} bytes per token, "
        f"{output.in_bytes(report['naive_bytes'])} per prompt{times}",
    ))
    rows.append(("why", report["why"]))
    if report["note"]:
        rows.append(("note", report["note"]))
    output.print_fields(rows)
    if len(layers) > 1:
        first = 0
        cells = []
        for run in layers:
            last = first + run["layers"] - 1
            cells.append((
                f"{first}" if first == last else f"{first}-{last}",
                _layer(run),
                f"{run['bytes_per_token']:,}",
            ))
            first = last + 1
        print()
        output.print_table(("layers with KV", "shape", "bytes per token and layer"), cells, right=(2,))


def _layer(run: Mapping[str, Any]) -> str:
    heads = f"{run['kv_heads']} key/value head{'s' if run['kv_heads'] > 1 else ''}"
    width = f"{run['key_dim']}" if run["key_dim"] == run["value_dim"] else f"({run['key_dim']} + {run['value_dim']})"
    window = "" if run["window"] is None else f", window {run['window']:,}"
    return f"{heads} of {width}{window}"
