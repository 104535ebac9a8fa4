"""The command line: ``equipoise index`` makes the index of tar shards that ``TarShards`` reads by.

    equipoise index shards/*.tar --output shards/index.arrow --columns labels.npy

Nothing heavy is imported before a command runs. What a user did wrong is one line on stderr and exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Balanced batches for long-context training."""


@app.command()
def index(
    shards: Annotated[
        list[Path], typer.Argument(help="Uncompressed tars, in the order in which documents are numbered.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The index to write; OUTPUT.parts/ lies beside it meanwhile.")
    ],
    tokens: Annotated[str, typer.Option(help="Extension of the members that hold tokens: npy, bin or json.")] = "npy",
    columns: Annotated[str, typer.Option(help="Extensions of further members, such as labels.npy,cls.")] = "",
    dtype: Annotated[str | None, typer.Option(help="Type of the values in bin members, such as uint16.")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Shards indexed at once; by default one per gigabyte, at most one per core."),
    ] = None,
) -> None:
    """Index the documents of tar shards: one Arrow file with place and length of each.

    Stop it and run it again: shards that were finished and have not changed are not read anew.
    """
    from .loaders.tar_index import index_shards
    from .loaders.tar_map import TarMap

    try:
        made = index_shards(
            shards,
            output,
            tokens=tokens,
            columns=[extension for extension in columns.split(",") if extension],
            dtype=dtype,
            processes=processes,
            progress=True,
        )
    except (ValueError, RuntimeError) as error:
        typer.echo(f"equipoise index: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(
            f"equipoise index: stopped; finished shards are kept in {output}.parts, run again to go on", err=True
        )
        raise typer.Exit(130) from None
    typer.echo(TarMap.read(str(made)).describe())
