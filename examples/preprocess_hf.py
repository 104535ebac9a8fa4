"""Packs made once: the standard library's sources as rows of a HF dataset, looked at, saved, reloaded and trained on.

    python examples/preprocess_hf.py
    python examples/preprocess_hf.py --recipe wlb --window 500 --max-tokens 2048 --num-proc 8

The model is a small Qwen3 and the trainer transformers' own: neither knows of equipoise. What keeps documents of a row apart
is ``position_ids``; that it does is checked on one row, against the same documents one at a time.
"""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from datasets import Dataset, load_from_disk
from documents import standard_library, tokenised
from equipoise.loaders.pack_dataset import pack_dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

VOCAB = 1024
QUICK = 60  # documents


def main(
    recipe: Annotated[str, typer.Option(help="By whose packing: static, wlb or skrull.")] = "static",
    max_tokens: Annotated[int, typer.Option(min=2, help="Hard cap of a pack.")] = 1024,
    window: Annotated[int, typer.Option(min=0, help="Documents packed together; 0: all.")] = 0,
    num_proc: Annotated[int, typer.Option(min=1, help="Processes that lay packs out.")] = 2,
    data: Annotated[Path | None, typer.Option(help=".jsonl, .parquet, .txt, a folder, or a saved HF dataset.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 40,
    quick: Annotated[bool, typer.Option(help=f"{QUICK} documents, a dozen steps.")] = False,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of documents.")] = 0,
    out: Annotated[Path, typer.Option(help="Where documents and packs go.")] = Path("runs"),
) -> None:
    """Pack, show, save, reload, train."""
    begin = time.time()
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take longer than one
    out.mkdir(parents=True, exist_ok=True)
    try:
        documents = tokenised(sample(out) if quick and data is None else data, VOCAB, out)
        packed = pack_dataset(
            documents,
            recipe,
            max_tokens=max_tokens,
            window=window or None,
            num_proc=num_proc,
            seed=seed,
            too_long="split",
            shift_labels=False,  # the Trainer's models shift labels themselves
            restart_positions=True,  # and find documents by positions
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = out / "packed"
    packed.save_to_disk(str(folder))
    reloaded = load_from_disk(str(folder))
    show(reloaded, max_tokens)
    print(f"saved to {folder} and reloaded: {len(reloaded)} rows, {size(folder) / 1e6:.1f} MB")
    net = model(seed)
    together, alone = together_and_alone(net, reloaded)
    print(f"loss of a row and of its documents one at a time: {together:.6f} and {alone:.6f}")
    first, last = train(net, reloaded, 12 if quick else steps, out)
    print(f"loss {first:.3f} at first, {last:.3f} at last; {time.time() - begin:.0f} s in all")


def sample(out: Path) -> Path:
    """A few documents as JSON lines."""
    path = out / "sample.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in islice(standard_library(), QUICK)))
    return path


def show(packed: Dataset, max_tokens: int) -> None:
    """How full and how even the packs are, and what a row looks like."""
    tokens = np.array([sum(lengths) for lengths in packed["seq_lengths"]])
    squares = np.array([sum(n * n for n in lengths) for lengths in packed["seq_lengths"]])
    print(packed.info.description)
    print(
        f"{tokens.mean() / max_tokens:.2%} filled; max/mean: tokens {tokens.max() / tokens.mean():.3f}, "
        f"attention {squares.max() / squares.mean():.3f}"
    )
    row = packed[richest(packed)]
    table = Table(title=f"A row of {len(row['input_ids'])} tokens from {len(row['doc_ids'])} documents")
    table.add_column("column")
    table.add_column("values")
    for name, values in row.items():
        table.add_row(name, " ".join(map(str, values[:16])) + (" …" if len(values) > 16 else ""))
    Console().print(table)


def richest(packed: Dataset) -> int:
    """The row of most documents among the first thousand."""
    return int(np.argmax([len(lengths) for lengths in packed["seq_lengths"][:1000]]))


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def model(seed: int) -> Qwen3ForCausalLM:
    """Two layers."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        use_cache=False,  # with a cache HF does not look for documents in position_ids
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def together_and_alone(net: Qwen3ForCausalLM, packed: Dataset) -> tuple[float, float]:
    """Mean loss per target of the row with the most documents, as a row and document by document."""
    row = packed.with_format("torch")[richest(packed)]
    named = ("input_ids", "position_ids", "labels")
    together = net(**{name: row[name][None] for name in named}).loss
    losses, targets = [], []
    for start, stop in zip(row["cu_seqlens"], row["cu_seqlens"][1:], strict=False):
        labels = row["labels"][start:stop]
        count = int((labels[1:] != -100).sum())
        if count:
            losses.append(net(input_ids=row["input_ids"][None, start:stop], labels=labels[None]).loss * count)
            targets.append(count)
    return float(together), float(sum(losses) / sum(targets))


def train(net: Qwen3ForCausalLM, packed: Dataset, steps: int, out: Path) -> tuple[float, float]:
    """A few steps of transformers' Trainer; the mean loss of the first and of the last quarter."""
    options = TrainingArguments(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=1,  # a row is a batch of documents already
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=net, args=options, train_dataset=packed)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    quarter = max(1, len(losses) // 4)
    return float(np.mean(losses[:quarter])), float(np.mean(losses[-quarter:]))


if __name__ == "__main__":
    typer.run(main)
