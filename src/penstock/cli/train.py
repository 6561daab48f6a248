"""penstock train: train from a configuration in a file and flags, in this process or in several; or predict a step."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from penstock import explain
from penstock.cli import show
from penstock.deciding.defaults import LANES, default_micro_batches
from penstock.errors import OutputError, UsageError
from penstock.schedule.keep_policies import POLICIES
from penstock.schedules import load_csv

if TYPE_CHECKING:
    from penstock.launch.config.config import Config
    from penstock.launch.config.config_reader import LoadedConfig
    from penstock.planning.explain.explanation import Explanation
    from penstock.training.callbacks.callback import Callback

_KEPT = "penstock.train"
_SHOW = "Show instead of training"
_STOPPED = 130  # the exit code of shells for Ctrl-C


class TrainCommand(TyperCommand):
    """A command that accepts each key of the configuration as a flag, with dashes or underscores."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - the context of typer
        """Remove the flags of the configuration; the rest are options of the command."""
        from penstock.launch.config.config_reader import take_flags

        own = [word for param in self.get_params(ctx) for word in (*param.opts, *param.secondary_opts)]
        rest, flags, faults = take_flags(args, own)
        ctx.meta[_KEPT] = flags, faults
        return super().parse_args(ctx, rest)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - a formatter of click
        """Add the keys of the configuration to the help."""
        super().format_help(ctx, formatter)
        _show_keys()


def train(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="The configuration in TOML; without a file, a small GPT is trained.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Cuts, memory and the predicted step.", rich_help_panel=_SHOW)
    ] = False,
    analytic: Annotated[
        str,
        typer.Option(
            help="With --dry-run: count for a device, such as h100, instead of measuring.", rich_help_panel=_SHOW
        ),
    ] = "",
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="All keys, their values and the sources of these values.", rich_help_panel=_SHOW
        ),
    ] = False,
    init: Annotated[
        Path | None, typer.Option(help="Write a configuration that explains each key.", rich_help_panel=_SHOW)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print plain lines, also in a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result, or the plan, as JSON.")] = False,
) -> None:
    """Train a model in a pipeline, from a TOML file and flags; flags override the file.

    The same file runs in threads, in processes on this machine (--nproc), and on
    several machines (--nnodes). If you start a training again, it resumes from
    the newest checkpoint in its folder.

    [bold]Examples[/bold]

      penstock train --init run.toml

      penstock train run.toml --lr 3e-4 --dry-run

      penstock train run.toml --nproc 4 --schedule zb_h1

    [bold]Exit codes[/bold]

    0 done, or ended by SIGTERM and saved; 1 error in user code; 2 bad configuration;
    65 bad checkpoint; 130 Ctrl-C; 137 processes lost, no restarts left; 143 ended by
    SIGTERM, but not saved in time.
    """
    from penstock.launch.config.config_reader import read_config

    flags, faults = ctx.meta[_KEPT]
    if init is not None:
        _init(init)
        return
    if analytic and not dry_run:
        raise UsageError("--analytic only applies to --dry-run: leave it out")
    given = read_config(file, flags, faults)
    if print_config:
        from penstock.launch.config.config_writer import to_toml

        typer.echo(to_toml(given), nl=False)
    elif dry_run:
        _show_plan(_explain(given.config, analytic.strip() or None, quiet=as_json), given.config, as_json=as_json)
    else:
        try:
            raise typer.Exit(_train(given, quiet=quiet, as_json=as_json))
        except KeyboardInterrupt:  # before the first step; later, the step is finished and saved
            typer.echo("Stopped by Ctrl-C before the first step: there is nothing to save.", err=True)
            raise typer.Exit(_STOPPED) from None


def _show_keys() -> None:
    """Show all keys of the configuration as flags, by group."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from penstock.launch.config.config import Config, keys_by_group

    console = Console()
    for group, names in keys_by_group().items():
        grid = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style="cyan")
        grid.add_column()
        for name in names:
            field = Config.model_fields[name]
            default = field.get_default(call_default_factory=True)
            shown = "" if default in (None, [], {}) else f" [default: {default}]"
            grid.add_row(f"--{name.replace('_', '-')}", Text.assemble(field.description or "", (shown, "dim")))
        console.print(Panel(grid, title=group, title_align="left", border_style="dim"))


def _init(path: Path) -> None:
    from penstock.launch.config.config_writer import example_file

    if path.exists():
        raise UsageError(f"--init: {path} exists already; name another file")
    try:
        path.write_text(example_file())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"{path}: all keys with their defaults. To train: penstock train {path}")


# ---- training


def _train(given: LoadedConfig, *, quiet: bool, as_json: bool) -> int:
    from penstock.launch.processes.launcher import needs_processes, start_processes

    again = shlex.join(["penstock", "train", *sys.argv[2:]])
    if needs_processes(given.config):
        code = start_processes(given, show="nothing" if as_json else "lines" if quiet else "drawn", again=again)
        if as_json:
            typer.echo(json.dumps({"code": code, **_last_event(Path(given.config.folder))}, indent=2))
        return code
    from penstock.launch.processes.train_process import run_here
    from penstock.training.view.view import View

    with ExitStack() as stack:  # progress before the first step, until the view takes over the terminal
        progress = stack.enter_context(show.progress(quiet=as_json or quiet))
        progress("load torch", 0, 1)
        callbacks = () if as_json else (_closing(stack), View(quiet=quiet, again=again))
        ending = run_here(given, callbacks=callbacks, progress=progress)
    if as_json and ending.summary is not None:
        typer.echo(json.dumps(_figures(ending.summary), indent=2))
    return ending.code


def _last_event(folder: Path) -> dict[str, Any]:
    """Return the last event that the processes wrote."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(lines[-1])) if lines else {}


def _closing(stack: ExitStack) -> Callback:
    """Return a callback that closes the stack when the training starts."""
    from penstock.training.callbacks.callback import Callback

    class Closing(Callback):
        def on_train_begin(self, trainer: Any) -> None:  # noqa: ANN401, ARG002 - a Trainer, which needs torch
            stack.close()

    return Closing()


def _figures(summary: Any) -> dict[str, Any]:  # noqa: ANN401 - a Summary, which needs torch
    return {
        "status": summary.status,
        "step": summary.step,
        "steps": summary.steps,
        "loss": summary.loss,
        "validation": summary.validation,
        "seconds": summary.seconds,
        "folder": str(summary.folder),
        "resumed_from": summary.resumed_from,
        "restarts": summary.restarts,
        "checkpoints": list(map(str, summary.checkpoints)),
        "timelines": list(map(str, summary.timelines)),
        "skipped": list(summary.skipped),
        "failures": list(summary.failures),
    }


# ---- the plan


def _explain(config: Config, analytic: str | None, *, quiet: bool) -> Explanation:
    """Return the explanation of the model that the configuration describes."""
    with show.progress(quiet=quiet) as progress:
        progress("load torch", 0, 1)
        from penstock.launch.build.data_source import explain_bad_batches
        from penstock.launch.build.trainer_builder import build_parts, lanes_of, threads_of
        from penstock.model.example import BatchLayout, read_example
        from penstock.pipeline.planned.placement import with_threads

        parts = build_parts(config)
        name = config.schedule_name
        schedule = load_csv(name) if name.lower().endswith(".csv") else name
        is_named = isinstance(schedule, str)
        layout = BatchLayout(config.batch_dim, config.whole)
        call = read_example(parts.example, None if isinstance(parts.model, list) else parts.model, layout)
        size = call.batch_size
        lanes = lanes_of(config) or LANES
        wanted = config.micro_batches or default_micro_batches(lanes, size)
        count = wanted if is_named else schedule.num_mbs  # type: ignore[union-attr]  # then it is a Schedule
        keep = POLICIES[config.keep].planned_as if isinstance(config.keep, str) else "hold"
        threads = threads_of(config, lanes if is_named else schedule.num_lanes)  # type: ignore[union-attr]
        with with_threads(threads), explain_bad_batches(config, parts.model, parts.example):
            return explain(
                parts.model,
                call,
                lanes=lanes if is_named else None,
                micro_batches=wanted if is_named else None,
                schedule=schedule,
                stages_per_lane=config.stages_per_lane,
                cuts=config.cuts,
                keep=keep,
                memory_limit=config.memory_limit,
                batch_size=-(-size // min(size, count)),
                training=True,
                capture_path=config.capture_path,
                analytic=analytic,
                progress=progress,
            )


def _show_plan(found: Explanation, config: Config, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    show.explanation(found)
    show.note(f"{config.steps} steps, in {config.folder}. Nothing was trained; to train, leave --dry-run out.")
