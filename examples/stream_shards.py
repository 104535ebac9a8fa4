"""Tar shards streamed by four ranks, of which one is killed in mid-epoch; two others finish the epoch.

    python examples/stream_shards.py                 # shards are indexed first: every rank reads its documents by offset
    python examples/stream_shards.py --stream        # no index, every other shard a .tar.gz: read from beginning to end

Started as a plain script, since it plays the launcher too (what torchrun does in a real job: it starts the ranks, and ends all
of them when one dies). The documents are the Python standard library's sources. No model is trained; in its place the ranks
tell each other what they got.

What a killed job did behind its last save is done again by the next one. So the documents of a run count up to the step that
the state tells, and at the end, over both runs and all ranks, each must have been there exactly once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from equipoise import BalancedLoader, Stream, ThdBatch, recipe
from equipoise.loaders.state_file import read_state
from equipoise.loaders.tar import TarShards
from webdataset import TarWriter

VOCAB = 1024
SHARDS = 7
SAVE_EVERY, KILLED_AT, VICTIM = 4, 10, 2  # steps, step, rank


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of the job."""

    number: int
    ranks: int
    killed: bool  # in mid-epoch
    folder: Path
    stream: bool
    max_tokens_per_rank: int

    def loader(self, rank: int) -> BalancedLoader:
        """This rank's loader: over the index of the shards, or over the shards themselves."""
        shards = sorted((self.folder / "shards").glob("*.tar*"))
        return BalancedLoader(
            Stream.tar(shards, columns=["json"]) if self.stream else TarShards(self.folder / "shards.arrow"),
            recipe("vrsp", attend="none"),
            max_tokens_per_rank=self.max_tokens_per_rank,
            tokens_per_step=12
            * self.max_tokens_per_rank
            * 31
            // 32,  # on any number of ranks, and so the steps are the same
            dp=self.ranks,
            rank=rank,
            too_long="split",
        )

    def file(self, rank: int) -> Path:
        """Where a rank writes down what it got."""
        return self.folder / f"seen-{self.number}-{rank}.jsonl"


def main(
    stream: Annotated[bool, typer.Option(help="Read without an index, also compressed shards.")] = False,
    documents: Annotated[int, typer.Option(min=50, help="Documents, of the standard library.")] = 400,
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="Hard cap of tokens on a rank.")] = 16384,
    quick: Annotated[bool, typer.Option(help="60 documents, small steps.")] = False,
    out: Annotated[Path, typer.Option(help="Where documents, shards and the state go.")] = Path("runs"),
) -> None:
    """Make shards, stream them, kill, resume, count."""
    begin, folder = time.time(), out / "stream_shards"
    if quick:
        documents, max_tokens_per_rank = 60, 2048
    lengths = make_shards(folder, documents, compress=stream)
    if not stream:
        index(folder)
    run = {"folder": folder, "stream": stream, "max_tokens_per_rank": max_tokens_per_rank}
    first = Run(number=0, ranks=4, killed=True, **run)
    second = Run(number=1, ranks=2, killed=False, **run)
    print(f"\n{first.ranks} ranks; rank {VICTIM} will be killed behind step {KILLED_AT}")
    launch(first)
    step = read_state(folder / "state.json")["step"]
    print(f"\n{second.ranks} ranks go on from the state, which stands before step {step}")
    launch(second)
    alike = count(first, second, step, lengths)
    print(f"{alike}; {time.time() - begin:.0f} s in all")


# The shards.


def make_shards(folder: Path, documents: int, *, compress: bool) -> np.ndarray:
    """Write the documents into uneven shards in webdataset's layout; the number of tokens of each."""
    from documents import standard_library, tokenised  # the ranks, which import this file, need neither

    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("shards/*"), *folder.glob("seen-*"), folder / "state.json"]:
        old.unlink(missing_ok=True)
    texts = [text for text in standard_library() if text]
    sample = folder / "sample.jsonl"
    sample.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[:: len(texts) // documents][:documents])
    )
    dataset = tokenised(sample, VOCAB, folder).with_format("numpy")
    edges = np.linspace(0, len(dataset) ** 0.5, SHARDS + 1) ** 2
    for shard, (start, stop) in enumerate(pairwise(np.rint(edges).astype(int).tolist())):
        name = f"{shard:06d}.tar{'.gz' if compress and shard % 2 else ''}"
        with TarWriter(str(folder / "shards" / name)) as tar:
            for number in range(start, stop):
                ids = dataset[number]["input_ids"].astype(np.uint16)
                tar.write({"__key__": f"{number:06d}", "npy": ids, "json": {"number": number, "tokens": len(ids)}})
        print(f"{name}: {stop - start} documents")
    return np.array([len(ids) for ids in dataset["input_ids"]])


def index(folder: Path) -> None:
    """What a user types in a shell, here without a process of its own."""
    from equipoise.cli import app

    shards = sorted(map(str, folder.glob("shards/*.tar")))
    command = ["index", *shards, "--output", str(folder / "shards.arrow"), "--columns", "json"]
    print(f"$ equipoise index {folder}/shards/*.tar {shlex.join(command[-4:])}")
    if code := app(command, standalone_mode=False):
        sys.exit(code)


# The job.


def launch(run: Run) -> None:
    """Start the ranks, and end all of them when one dies. Raises BadParameter where the epoch is too short for that."""
    (run.folder / "meeting").unlink(missing_ok=True)
    multiprocessing.set_forkserver_preload(["equipoise.loaders.loader", "equipoise.loaders.tar", "typer"])
    context = mp.start_processes(rank_main, (run,), nprocs=run.ranks, join=False, start_method="forkserver")
    try:
        while not context.join():
            pass
    except (mp.ProcessExitedException, mp.ProcessRaisedException):  # of the killed one, or of one that misses it
        if not run.killed or context.processes[VICTIM].exitcode != -signal.SIGKILL:
            raise
        print(f"rank {VICTIM} was killed; the launcher ended the others")
    else:
        if run.killed:
            raise typer.BadParameter(f"the epoch ended before step {KILLED_AT}: use more --documents")


def rank_main(rank: int, run: Run) -> None:
    """One rank: the rest of the epoch from the state, if there is one."""
    torch.set_num_threads(1)
    if rank:
        warnings.simplefilter("ignore")  # that ranks are others now is told by one of them
    dist.init_process_group("gloo", f"file://{(run.folder / 'meeting').resolve()}", rank=rank, world_size=run.ranks)
    loader, state = run.loader(rank), run.folder / "state.json"
    if state.exists():
        loader.load(state)
    waited = 0.0
    with open(run.file(rank), "w") as seen:
        for number, step in enumerate(loader.steps(), 1):
            batches = list(step)
            print(json.dumps({"step": batches[0].step, "pieces": pieces(batches)}), file=seen, flush=True)
            waiting = loader.waiting.first + loader.waiting.later
            tell(batches, waiting - waited)
            waited = waiting
            if number % SAVE_EVERY == 0:
                loader.save(state)  # rank 0 writes; a state is the same on all ranks
            if run.killed and batches[0].step == KILLED_AT and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
    loader.close()
    dist.destroy_process_group()


def pieces(batches: list[ThdBatch]) -> list[tuple[int, int, int]]:
    """(document, first token, tokens) of what this rank got in a step, by the number that the document's metadata tells."""
    found = []
    for batch in batches:
        of_each = zip(batch.documents, batch.number, batch.starts, batch.cu_seqlens.diff(), strict=True)
        found += [tuple(map(int, piece)) for document, *piece in of_each if document >= 0]  # the others are fillers
    return found


def tell(batches: list[ThdBatch], waited: float) -> None:
    """Print a step as all ranks see it; ranks wait for each other here, as they would for gradients."""
    tokens = sum(batch.input_ids.numel() for batch in batches)
    mine = torch.tensor([tokens, sum(batch.cost for batch in batches), waited], dtype=torch.float64)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)
    of_all, costs, waits = torch.stack(told).T
    if dist.get_rank() == 0:
        print(
            f"step {batches[0].step:3d}: tokens {' '.join(f'{each:6.0f}' for each in of_all)}   predicted cost, slowest/mean "
            f"{costs.max() / costs.mean():.3f}   waited {1e3 * waits.max():5.0f} ms at most",
            flush=True,
        )


# The proof.


def count(first: Run, second: Run, step: int, lengths: np.ndarray) -> str:
    """Count tokens of every document over both runs and all ranks; exit code 1 unless each was there once."""
    steps = {run: seen(run) for run in (first, second)}
    counted = [steps[first][at] for at in steps[first] if at < step] + list(steps[second].values())
    there = [np.zeros(tokens, int) for tokens in lengths]
    for number, start, tokens in (piece for each in counted for piece in each.elements()):
        there[number][start : start + tokens] += 1
    lost, doubled = (
        sum(bool(test.any()) for test in tests) for tests in ([t < 1 for t in there], [t > 1 for t in there])
    )
    again = range(step, KILLED_AT + 1)  # what some ranks have begun behind it is no step
    alike = sum(steps[first][at] == steps[second][at] for at in again)
    print(
        f"\nSteps {min(steps[first])} … {step - 1} of the first run count, and all of the second: "
        f"{len(there)} documents with {sum(map(len, there))} tokens, {lost} lost, {doubled} doubled"
    )
    if lost or doubled:
        sys.exit(1)
    return f"{len(again)} steps behind the last save were done again, {alike} of them with the very same documents"


def seen(run: Run) -> dict[int, Counter[tuple[int, int, int]]]:
    """The pieces that all ranks together got in each step."""
    steps: dict[int, Counter[tuple[int, int, int]]] = {}
    for rank in range(run.ranks):
        for line in run.file(rank).read_text().splitlines():
            told = json.loads(line)
            steps.setdefault(told["step"], Counter()).update(map(tuple, told["pieces"]))
    return steps


if __name__ == "__main__":
    typer.run(main)
