"""`keepwarm bench`: what caching costs and saves on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepwarm.checks import need
from keepwarm.cli import output
from keepwarm.cli.options import Dtype, Json, Model, chosen_model, measured, open_engine
from keepwarm.errors import ConfigError

if TYPE_CHECKING:
    from keepwarm.evaluation.economics import Growth, Row

bench = typer.Typer(help="What caching costs and saves on this machine.", no_args_is_help=True)


@bench.command()
def tools(
    model: Model = None,
    counts: Annotated[str, typer.Option("--counts", help="Numbers of tools, with commas.")] = "5,10,20,50",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Requests of each kind; medians are told.")] = 9,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option("--output", help="Folder for the figures as JSON lines and a plot.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure compiled sets of tools: what compiling costs, what each request saves, and when that pays. Run it on a
    quiet machine."""
    numbers, source = _numbers(counts), chosen_model(model)
    need("llguidance", "constrain", "measuring requests with a forced call")
    if out is not None:
        need("matplotlib", "plot", "a plot")
    with open_engine(source, measured(dtype=dtype)) as engine:
        from keepwarm.evaluation import economics

        about = {"model": Path(source).name} | economics.machine(engine)
        rows: list[Row] = []
        growth: Growth | None = None
        with output.working("measuring") as work:
            for found in economics.measure(engine, numbers, rounds, work.say):
                if isinstance(found, economics.Row):
                    rows.append(found)
                else:
                    growth = found
    assert growth is not None
    if out is not None:
        economics.write(rows, growth, about, out)
    if as_json:
        output.print_json({**about, "rows": [row.to_dict() for row in rows], "growth": growth.to_dict()})
        return
    _print(rows, growth)


def _numbers(counts: str) -> list[int]:
    try:
        return [int(part) for part in counts.split(",")]
    except ValueError:
        raise ConfigError(f"--counts must be whole numbers with commas between, got {counts!r}") from None


def _print(rows: list[Row], growth: Growth) -> None:
    headers = (
        "tools",
        "tokens",
        "KV",
        "compile",
        "hit",
        "with a call forced",
        "floor",
        "in full",
        "speed-up",
        "saved each",
        "saved by 1,000",
        "break-even",
        "bit-identical",
    )
    cells = [
        (
            str(row.tools),
            f"{row.tokens:,}",
            output.in_bytes(row.cache_bytes),
            output.in_ms(row.compile_ms),
            output.in_ms(row.hit_ms),
            output.in_ms(row.constrained_ms),
            output.in_ms(row.floor_ms),
            output.in_ms(row.full_ms),
            f"{row.speedup:.1f}x",
            output.in_ms(row.saved_ms),
            f"{row.saved_s_at_1000:,.0f} s",
            f"{row.break_even:.2f}",
            "yes" if row.identical else "NO",
        )
        for row in rows
    ]
    output.print_table(headers, cells, right=tuple(range(12)))
    print("Times to first token. In full: the faster of the scheduled cold run and one pass through transformers.")
    print("Break-even: requests after which compiling first has cost less than computing each in full.")
    if len(rows) > 1:
        print(
            f"From {rows[0].tools} to {rows[-1].tools} tools a hit grows {growth.hit:.2f} times, "
            f"the floor {growth.floor:.2f}, a full prefill {growth.full:.1f}."
        )
    print(f"One tool added to {rows[-1].tools}: {growth.edit_tokens:,} tokens recomputed ({growth.edit_share:.1%}).")
