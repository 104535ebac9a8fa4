"""The command line: ``equipoise index`` makes the index of tar shards that ``TarShards`` reads by, ``equipoise draw`` a picture
of who computes which part of a pack's attention.

    equipoise index shards/*.tar --output shards/index.arrow --columns labels.npy
    equipoise draw 4096 1024 512 --recipe magi --cp 4 --mask sliding_window:window=256 --output plan.png

Nothing heavy is imported before a command runs. What a user did wrong is one line on stderr and exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .packing.masks import Mask
    from .packing.packs import Int64
    from .recipes import Recipe

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


@app.command()
def draw(
    lengths: Annotated[list[int], typer.Argument(min=1, help="Tokens of the pack's documents.")],
    recipe: Annotated[str, typer.Option(help="By whose sharding and attention.")] = "magi",
    shard: Annotated[str | None, typer.Option(help="Another sharding than the recipe's.")] = None,
    attend: Annotated[str | None, typer.Option(help="Other attention than the recipe's.")] = None,
    cp: Annotated[int, typer.Option(min=1, help="Ranks of the CP group.")] = 4,
    mask: Annotated[
        str,
        typer.Option(help="Kind and options, such as sliding_window:window=256 or shared_question:answers=4."),
    ] = "causal",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="An image to write; without it, text is printed.")
    ] = None,
    cells: Annotated[
        int, typer.Option(min=0, help="Cells of the picture in each direction; 0: 48 of text, 256 of an image.")
    ] = 0,
) -> None:
    """Draw who computes which block of a pack's attention: a colour, or a character, for each rank."""
    from .packing.mask_picture import draw as drawn
    from .packing.mask_picture import picture
    from .recipes import recipe as named

    try:
        kind, wanted = _mask(mask, lengths)
        chosen = named(recipe, shard=shard, attend=attend)
        if kind != "causal":
            chosen.check_masks(kind, pad_tp=False)
        work = _work(chosen, wanted, cp)
        if output is not None:
            title = f"{chosen.shard}, {chosen.attend}, {kind} on {cp} ranks"
            drawn(wanted, work, cells=cells or 256, title=title).figure.savefig(output, dpi=150)
    except (ValueError, ImportError) as error:
        typer.echo(f"equipoise draw: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(str(output) if output else picture(wanted, work, cells=cells or 48))


def _mask(spec: str, lengths: list[int]) -> tuple[str, Mask]:
    """Kind and mask of a pack, from ``kind:name=value,…``."""
    from .packing import mask_kinds

    kinds = {
        "causal": mask_kinds.causal,
        "full": mask_kinds.full,
        "sliding_window": mask_kinds.sliding_window,
        "window_with_sinks": mask_kinds.window_with_sinks,
        "shared_question": _shared_question,
        "causal_blockwise": mask_kinds.causal_blockwise,
        "prefix_lm": mask_kinds.prefix_lm,
        "block_causal": _block_causal,
    }
    kind, _, rest = spec.partition(":")
    if kind not in kinds:
        raise ValueError(f"a mask is one of {', '.join(kinds)}; got {kind!r}")
    options: dict[str, Any] = {"lengths": lengths}
    for option in filter(None, rest.split(",")):
        name, _, value = option.partition("=")
        if not value.isdigit():
            raise ValueError(f"options of a mask are name=number, parted by commas; got {option!r}")
        options[name] = int(value)
    try:
        return kind, kinds[kind](**options)  # type: ignore[operator]
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from None


def _shared_question(lengths: list[int], answers: int = 4) -> Mask:
    """The question and each answer have the same share."""
    from .packing.mask_kinds import shared_question, shares_of_questions

    return shared_question(*shares_of_questions(lengths, 1 / (answers + 1), answers))


def _block_causal(lengths: list[int], block: int = 256) -> Mask:
    from .packing.mask_kinds import block_causal, equal_blocks

    return block_causal(equal_blocks(lengths, block))


def _work(chosen: Recipe, mask: Mask, cp: int) -> Int64:
    """Tiles of all ranks of the group, int64[m, 8]."""
    import numpy as np

    from .attention.plan import AttentionPlan
    from .packing.cost import SEVEN_B, CostModel, Hardware
    from .packing.packs import Spans
    from .samplers.cluster import Cluster

    total, none = int(mask.tokens.sum()), np.zeros(len(mask), np.int64)
    spans = Spans(document=np.arange(len(mask)), start=none, stop=mask.tokens, pairs=mask.pairs())
    cluster = Cluster(dp=1, cp=cp, max_tokens_per_rank=-(-2 * total // cp))
    decision = chosen.decide(spans, cp, cluster, CostModel.of(SEVEN_B, Hardware()))
    ranks, most = tuple(range(cp)), cluster.max_tokens_per_rank
    plans = [chosen.laid_out(mask.cu_seqlens, ranks, rank, decision, most, mask=mask)[1] for rank in ranks]
    if not all(isinstance(plan, AttentionPlan) for plan in plans):
        raise ValueError(
            f"attend={chosen.attend!r} divides heads or leaves attention to you: there are no blocks to draw"
        )
    return np.concatenate([plan.tiles[plan.tiles[:, 0] == rank] for rank, plan in enumerate(plans)])
