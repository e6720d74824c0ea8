"""The command tree, and how errors become exit codes.

* 0: done
* 1: any other error
* 2: usage, setting or prompt
* 3: model
* 4: store
* 5: a proof failed: logits differ where they must not
* 6: `verify` found damage
* 7: `doctor` found what keeps Keepwarm from working
* 130: interrupted
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from keepwarm import __version__
from keepwarm.cli import (
    bench,
    bundles,
    chat,
    explain,
    fleet,
    generate,
    keeping,
    launch,
    lint,
    proof,
    serve,
    simulate,
    size,
    slots,
    stored,
)
from keepwarm.cli.demo import command as demo
from keepwarm.cli.doctor import command as doctor
from keepwarm.errors import ConfigError, KeepwarmError, ModelError, PromptError, StoreError, TemplateError

INTERRUPTED = 130


class _Commands(TyperGroup):
    """All commands. Reports an interruption, with what `output.resumable` says about it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            said = f": {stopped}" if str(stopped) else ""
            print(f"\nkeepwarm: interrupted{said}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def program(name: str, help: str | None = None) -> typer.Typer:
    """Make a program of several commands, to be run by `main`."""
    return typer.Typer(
        name=name,
        cls=_Commands,
        help=help,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


app = program("keepwarm")
app.command()(demo.demo)
app.command()(generate.run)
app.command()(generate.warm)
app.command()(chat.chat)
app.command()(explain.explain)
app.command()(lint.lint)
app.command()(proof.prove)
app.command()(doctor.doctor)
app.command()(stored.ls)
app.command()(stored.show)
app.command()(keeping.verify)
app.command()(keeping.gc)
app.command()(keeping.purge)
app.command(name="export")(bundles.export)
app.command(name="import")(bundles.import_)
app.command()(size.size)
app.command()(fleet.stats)
app.command()(simulate.simulate)
app.add_typer(bench.bench, name="bench")
app.command()(serve.serve)
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(slots.slots)
app.add_typer(serve.keys, name="keys")
app.add_typer(serve.config, name="config")
app.command(hidden=True)(proof.replay)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"keepwarm {__version__}")
        raise typer.Exit


_BEGIN = """Keepwarm computes a language model's state for a prompt once, and reuses it. To begin with:

  keepwarm demo      a small model reads 20 tool schemas: cold, warm, and again in a new process
  keepwarm chat      a conversation that is still there tomorrow
  keepwarm serve     the model over HTTP, for OpenAI's and Anthropic's clients, with a web page
  keepwarm doctor    looks at this machine, and says what to do about what is wrong

`keepwarm --help` lists all commands, `keepwarm COMMAND --help` explains one."""


@app.callback(invoke_without_command=True, no_args_is_help=False)
def _keepwarm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keeps prompts warm: computes a language model's KV state once and reuses it, without changing the answer."""
    if context.invoked_subcommand is None:
        print(_BEGIN)


def exit_code(error: KeepwarmError) -> int:
    """The exit code of an error, by its kind."""
    if isinstance(error, ConfigError | PromptError):
        return 2
    if isinstance(error, ModelError):
        return 3
    return 4 if isinstance(error, StoreError) else 1


def main(arguments: Sequence[str] | None = None, commands: typer.Typer = app, name: str = "keepwarm") -> None:
    """Run `keepwarm` with these arguments (the process's own by default), or run other `commands` in the same way.
    Always ends with SystemExit."""
    try:
        commands(args=arguments, prog_name=name)
    except KeepwarmError as error:
        lacks_cure = isinstance(error, TemplateError) and "--raw" not in str(error)
        cure = "; on the command line: --raw" if lacks_cure else ""
        print(f"keepwarm: {error}{cure}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:  # before a command was chosen
        raise SystemExit(INTERRUPTED) from None
