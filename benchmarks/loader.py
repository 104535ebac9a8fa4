"""Tokens per second through BalancedLoader and through torch's DataLoader with HF's flattening collator.

    python benchmarks/loader.py [--documents 20000] [--workers 0,2] [--repeats 5]

Same Arrow dataset on disk (lognormal lengths, mean about 1,000 tokens), same number of workers, about the same tokens per
batch, rounds interleaved in one run; medians. What is read is touched (summed), so that no lazily mapped page escapes.
Beside it stands what a bare copy of the delivered bytes costs on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from equipoise import BalancedLoader, recipe
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

MAX_TOKENS = 65536


def corpus(documents: int, path: str) -> Dataset:
    """Documents of lognormal length, written and read back by datasets (memory-mapped, many record batches)."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.2, 1.2, documents), 8, MAX_TOKENS).astype(int)

    def rows():
        for tokens in lengths:
            yield {"input_ids": rng.integers(0, 50_000, tokens)}

    Dataset.from_generator(rows, cache_dir=path).save_to_disk(f"{path}/documents")
    return load_from_disk(f"{path}/documents")


def drain(batches: object) -> tuple[int, int]:
    """Tokens delivered and a checksum over them."""
    tokens, checksum = 0, 0
    for batch in batches:  # type: ignore[attr-defined]
        tokens += batch["input_ids"].numel()
        checksum += int(batch["input_ids"].sum())
        assert batch["labels"].shape == batch["position_ids"].shape == batch["input_ids"].shape
    return tokens, checksum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the checksum must not spin on the cores that workers need
    with tempfile.TemporaryDirectory() as path:
        dataset = corpus(options.documents, path)
        print(f"{len(dataset)} documents; median tokens/s of {options.repeats} interleaved rounds")
        for workers in map(int, options.workers.split(",")):
            compare(dataset, workers, options.repeats)


def compare(dataset: Dataset, workers: int, repeats: int) -> None:
    """One line per loader and the ratio."""
    per_batch = max(
        1,
        round(
            MAX_TOKENS * len(dataset) / sum(map(len, dataset.select(range(1000))["input_ids"])) / len(dataset) * 1000
        ),
    )
    balanced = BalancedLoader(
        dataset,
        recipe("vrsp", attend="none"),
        max_tokens_per_rank=MAX_TOKENS,
        documents_per_step=512,
        dp=1,
        num_workers=workers,
        ahead=8,
    )
    flattening = DataLoader(
        dataset,
        batch_size=per_batch,
        shuffle=True,
        collate_fn=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    runs: dict[str, Callable[[], tuple[int, int]]] = {
        "BalancedLoader": lambda: drain(balanced),
        "DataLoader + DataCollatorWithFlattening": lambda: drain(flattening),
        "bare copy of four int64 a token": bare_copy,
    }
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    balanced_sum = drain(balanced)
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            tokens, checksum = run()
            speeds[name].append(tokens / (time.perf_counter() - begin))
            if name != "bare copy of four int64 a token":
                assert (tokens, checksum) == balanced_sum, "the two loaders must deliver the same tokens"
    median = {name: float(np.median(values)) for name, values in speeds.items()}
    for name, value in median.items():
        print(f"  workers {workers}: {name:42s} {value / 1e6:8.1f} M tokens/s")
    ratio = median["BalancedLoader"] / median["DataLoader + DataCollatorWithFlattening"]
    print(f"  workers {workers}: ratio {ratio:.1f}")


def bare_copy() -> tuple[int, int]:
    """input_ids, labels, position_ids and shard_index of 64K tokens, copied 64 times."""
    source = torch.zeros(4, MAX_TOKENS, dtype=torch.int64)
    for _ in range(64):
        source.clone()
    return 64 * MAX_TOKENS, 0


if __name__ == "__main__":
    main()
