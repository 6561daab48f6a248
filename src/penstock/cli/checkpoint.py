"""penstock checkpoint: inspect and verify checkpoints, and convert weights to and from other formats."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.report.units import printable, show_bytes

_BAD = 65  # exit code for a bad checkpoint: a retry does not help

checkpoint = typer.Typer(
    name="checkpoint",
    help="Inspect and verify checkpoints, and convert weights to and from other formats.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Where = Annotated[
    Path, typer.Argument(help="A checkpoint, or a folder of checkpoints: then its newest one.", metavar="PATH")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Every = Annotated[bool, typer.Option("--all", help="All checkpoints of the folder, newest last.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step, if PATH is a folder.", min=0)]


class Form(StrEnum):
    """The formats of other tools."""

    SAFETENSORS = "safetensors"
    HUGGINGFACE = "huggingface"
    DCP = "dcp"


@checkpoint.command()
def inspect(
    path: Where,
    step: Step = None,
    every: Every = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint: step, plan, tensors, bytes and the versions that wrote it.

    [bold]Examples[/bold]

      penstock checkpoint inspect run

      penstock checkpoint inspect run/checkpoint-000500 --tensors

      penstock checkpoint inspect run --all --json
    """
    from penstock.checkpoint.reader import choose, describe

    found = [describe(folder) for folder in choose(path, step=step, is_all=every)]
    if as_json:
        typer.echo(json.dumps(found if every else found[0], indent=2))
        return
    for number, one in enumerate(found):
        typer.echo(("\n" if number else "") + "\n".join(_lines(one, tensors=tensors)))


@checkpoint.command()
def verify(path: Where, step: Step = None, every: Every = False, as_json: AsJson = False) -> None:
    """Read all bytes of a checkpoint; print OK, or the faults and their files (exit code 65).

    [bold]Examples[/bold]

      penstock checkpoint verify run

      penstock checkpoint verify run --all --json
    """
    from penstock.checkpoint.reader import choose
    from penstock.checkpoint.reader import verify as faults_in

    found = [{"folder": str(folder), "faults": faults_in(folder)} for folder in choose(path, step=step, is_all=every)]
    if as_json:
        typer.echo(json.dumps(found if every else found[0], indent=2))
    for one in found if not as_json else ():
        typer.echo(printable(f"{one['folder']}: {'damaged' if one['faults'] else 'OK'}"))
        for fault in one["faults"]:
            typer.echo(printable(f"  {fault}"))
    if any(one["faults"] for one in found):
        raise typer.Exit(_BAD)


@checkpoint.command(name="export")
def export(
    path: Where,
    target: Annotated[Path, typer.Argument(help="A file for safetensors, a folder for the others.", metavar="TARGET")],
    form: Annotated[
        Form | None, typer.Option(help="The format; by default safetensors if TARGET ends so, else huggingface.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json to copy to the weights, for from_pretrained.")
    ] = None,
    step: Step = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint in the format of another tool, and check each tensor.

    [bold]Examples[/bold]

      penstock checkpoint export run model --config config.json

      penstock checkpoint export run model.safetensors

      penstock checkpoint export run/checkpoint-000500 for_torch --form dcp
    """
    from penstock.checkpoint.formats.exchange import export_checkpoint
    from penstock.checkpoint.reader import choose
    from penstock.tensor_files.manifest import read_manifest

    (folder,) = choose(path, step=step)
    wanted = form or (Form.SAFETENSORS if target.suffix == ".safetensors" else Form.HUGGINGFACE)
    moved = export_checkpoint(read_manifest(folder), target, form=wanted.value, config=config, force=force)
    _show_moved(folder, moved, as_json=as_json)


@checkpoint.command(name="import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file, a folder of Hugging Face or torch.distributed.checkpoint, or a .pt file.",
            metavar="SOURCE",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder for the checkpoint.", metavar="FOLDER")],
    step: Annotated[int, typer.Option(help="The step of the checkpoint.", min=0, max=10**17)] = 0,
    prefix: Annotated[
        str, typer.Option(help="Import only names with this prefix, such as 'model.', and strip it.")
    ] = "",
    key: Annotated[str | None, typer.Option(help="The key of the state dict in a .pt file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from the weights of another tool; no code in the files is run.

    The checkpoint contains only the model. A training resumes from it if it is in its folder, with a new optimizer.

    [bold]Examples[/bold]

      penstock checkpoint import gpt2/model.safetensors run

      penstock checkpoint import gpt2 run --prefix transformer.

      penstock checkpoint import old.pt run --key model
    """
    from penstock.checkpoint.formats.exchange import import_weights

    _show_moved(source, import_weights(source, folder, step=step, prefix=prefix, key=key), as_json=as_json)


def _show_moved(source: Path, moved: Any, *, as_json: bool) -> None:  # noqa: ANN401 - the type needs torch
    if as_json:
        plain = {"source": str(source), "target": str(moved.path)}
        typer.echo(json.dumps({**plain, "tensors": moved.num_tensors, "bytes": moved.num_bytes}, indent=2))
        return
    typer.echo(printable(f"{source} -> {moved.path}: {moved.num_tensors} tensors, {show_bytes(moved.num_bytes)}"))


def _lines(found: dict[str, Any], *, tensors: bool) -> list[str]:
    plan = found["plan"]
    cut = ", ".join(
        f"{key.replace('_', '-')}: {plan[key]}"
        for key in ("schedule", "lanes", "stages", "micro_batches", "cuts")
        if key in plan
    )
    rest = [name for word, name in (("scaler", "the scaler"), ("data", "the position in the data")) if found[word]]
    groups = found["optimizer"]
    optimizer = "none" if groups is None else f"{sum(group['parameters'] for group in groups)} parameters"
    lines = [
        f"{found['folder']}: step {found['step']}, {show_bytes(found['bytes'])}",
        f"  plan: {cut or 'none: it was imported'}",
        f"  optimizer: {optimizer}; schedulers: {found['schedulers']}; also: {', '.join(rest) or 'nothing'}",
        f"  versions: {', '.join(f'{name} {text}' for name, text in sorted(found['versions'].items()))}",
    ]
    for file in found["files"]:
        count = f", {len(file['tensors'])} tensors" if file["name"].endswith(".safetensors") else ""
        lines.append(f"  {file['name']}: {show_bytes(file['bytes'])}{count}")
        for name, tensor in sorted(file["tensors"].items()) if tensors else ():
            lines.append(f"    {name}: {tensor['dtype']} {tensor['shape']}")
    if found["aliases"]:
        lines.append(f"  stored once: {', '.join(f'{a} = {n}' for a, n in sorted(found['aliases'].items()))}")
    if found["notes"]:
        lines.append(f"  notes: {json.dumps(found['notes'])[:2000]}")
    return [printable(line) for line in lines]
