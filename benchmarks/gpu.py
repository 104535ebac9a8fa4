"""One prepared script for one GPU, under four minutes: the kernel contract, varlen throughput, and what planning adds.

    pip install -e ".[test]" && python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --quick               # the same path over the CPU kernel, to try the script itself

It was not run on a GPU yet: only the CPU path was.

contract: tests/attention/kernels on the GPU, so those that are skipped elsewhere: flash-attn's kernels where it is installed,
torch's varlen attention always. throughput: TFLOP/s over a pack of equal documents, causal, by the document's length, whole
and as one of 8 ranks holds them (two chunks of each document as queries, its keys gathered); forward counts 4 · pairs ·
heads · dim, backward 2.5 times that. Beside it the published ones of an H100 (64 query and 4 KV heads of 128, forward), by
which packs are planned. overhead: a pack of 64 random documents: its plan for one rank of 8, the kernel's preparation, and
`attend` on one rank beside the kernel's own calls; medians.

Exits with 2 where there is no GPU, with 1 where a contract test fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from equipoise import CpGroups
from equipoise.attention import bands
from equipoise.attention.executor import attend
from equipoise.attention.gather import gather_plan
from equipoise.attention.kernels.contract import Scores, kernel_for
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.attention.stages import prepare
from equipoise.packing.shards import zigzag
from torch import Tensor

ROOT = Path(__file__).parents[1]
CP = 8
# Forward TFLOP/s on an H100 by document length, whole and cut over 8 ranks.
WHOLE = {32: 12, 64: 40, 128: 85, 256: 139, 512: 204, 1024: 283, 2048: 322, 4096: 348, 8192: 361, 16384: 370}
CUT = {128: 15, 256: 39, 512: 100, 1024: 226, 2048: 279, 4096: 324, 8192: 348}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tokens: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    rounds: int


FULL = Sizes(tokens=65536, lengths=tuple(WHOLE), heads=64, kv_heads=4, dim=128, rounds=7)
QUICK = Sizes(tokens=1024, lengths=(128, 512), heads=4, kv_heads=2, dim=32, rounds=2)


def contract(quick: bool) -> int:
    """Exit status of the contract's tests; prints their summary."""
    if importlib.util.find_spec("pytest") is None:
        print("contract: pytest is not installed, so it was not tested")
        return 0
    chosen = ["-k", "contract and GQA"] if quick else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "tests/attention/kernels",
        *chosen,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    print("contract: " + "\n  ".join(done.stdout.strip().splitlines()[-8:]), flush=True)
    return done.returncode


def whole_tiles(tokens: int, length: int) -> np.ndarray:
    """Causal documents of `length`, as tiles int64[n, 6]."""
    start = np.arange(0, tokens, length)
    stop = start + length
    return np.stack([start, stop, start, stop, 0 * start, np.full_like(start, bands.NO_LIMIT)], axis=1)


def cut_tiles(tokens: int, length: int) -> np.ndarray:
    """What the first of CP ranks computes of them, cut zigzag, with all keys gathered in the pack's order."""
    chunk = length // (2 * CP)
    begin = np.repeat(np.arange(0, tokens, length), 2)
    first = np.tile([0, (2 * CP - 1) * chunk], len(begin) // 2)  # the chunk's place in its document
    q0 = np.arange(len(begin)) * chunk
    limit = np.full_like(q0, bands.NO_LIMIT)
    return np.stack([q0, q0 + chunk, begin, begin + first + chunk, q0 - begin - first, limit], axis=1)


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of `rounds`, after two to warm up."""
    spent = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent[2:])


def tensors(sizes: Sizes, num_q: int, num_k: int, device: torch.device) -> list[Tensor]:
    """q, k, v, dout."""
    shapes = [(num_q, sizes.heads), (num_k, sizes.kv_heads), (num_k, sizes.kv_heads), (num_q, sizes.heads)]
    return [torch.randn(*shape, sizes.dim, dtype=torch.bfloat16, device=device) for shape in shapes]


def rates(kernel: Any, tiles: np.ndarray, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """TFLOP/s forward, and forward and backward together."""
    num_q, num_k = int(tiles[:, 1].max()), sizes.tokens
    q, k, v, dout = tensors(sizes, num_q, num_k, device)
    handle, scores = kernel.prepare(tiles, num_q, num_k, device), Scores(scale=sizes.dim**-0.5)
    out, lse = kernel.forward(handle, q, k, v, scores)
    out = out.to(q.dtype)
    forward = seconds(lambda: kernel.forward(handle, q, k, v, scores), device, sizes.rounds)
    backward = seconds(lambda: kernel.backward(handle, dout, q, k, v, out, lse, scores), device, sizes.rounds)
    work = 4e-12 * float(bands.pairs(tiles).sum()) * sizes.heads * sizes.dim
    return work / forward, 3.5 * work / (forward + backward)


def throughput(kernel: Any, sizes: Sizes, device: torch.device) -> None:
    print(
        f"\nTFLOP/s, {sizes.tokens} tokens, {sizes.heads}/{sizes.kv_heads} heads of {sizes.dim}, bf16 (H100, published)"
    )
    print(f"{'document':>10}{'forward':>10}{'':8}{'both':>8}   | over {CP} ranks{'forward':>10}{'':8}{'both':>8}")
    for length in sizes.lengths:
        forward, both = rates(kernel, whole_tiles(sizes.tokens, length), sizes, device)
        line = f"{length:>10}{forward:10.3g} {_known(WHOLE, length):7}{both:8.3g}   |"
        if length >= 16 * CP:
            forward, both = rates(kernel, cut_tiles(sizes.tokens, length), sizes, device)
            line += f"{'':13}{forward:10.3g} {_known(CUT, length):7}{both:8.3g}"
        print(line, flush=True)


def _known(table: dict[int, int], length: int) -> str:
    return f"({table[length]})" if length in table else ""


def overhead(kernel: Any, sizes: Sizes, device: torch.device) -> None:
    groups, rng = CpGroups(dp=1, cp=1), np.random.default_rng(0)
    print(
        "\n64 random documents: ms to plan one rank of 8 and to prepare its kernels; attend / kernel, forward and backward"
    )
    for tokens in sorted({min(8192, sizes.tokens), min(32768, sizes.tokens), sizes.tokens}):
        cu = np.concatenate([[0], np.sort(rng.choice(np.arange(1, tokens), 63, replace=False)), [tokens]])
        shards = zigzag(cu, CP)
        planning = seconds(lambda shards=shards: gather_plan(shards, tuple(range(CP)), 0), device, sizes.rounds)
        eighth = gather_plan(shards, tuple(range(CP)), 0)
        preparing = seconds(lambda plan=eighth: prepare(lower(plan, 0), kernel, device), device, sizes.rounds)
        plan = ring_plan(zigzag(cu, 1), ranks=(0,))
        q, k, v, dout = tensors(sizes, tokens, tokens, device)
        handle, scores = kernel.prepare(_tiles(cu), tokens, tokens, device), Scores(scale=sizes.dim**-0.5)

        def bare(handle=handle, q=q, k=k, v=v, dout=dout, scores=scores) -> object:
            out, lse = kernel.forward(handle, q, k, v, scores)
            return kernel.backward(handle, dout, q, k, v, out.to(q.dtype), lse, scores)

        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def framed(plan=plan, leaves=leaves, dout=dout) -> object:
            return torch.autograd.grad(attend(plan, *leaves, groups), leaves, dout)

        alone, whole = seconds(bare, device, sizes.rounds), seconds(framed, device, sizes.rounds)
        print(
            f"  {tokens:>7} tokens: plan {1e3 * planning:.2f}, prepare {1e3 * preparing:.2f}; "
            f"{1e3 * whole:.2f} / {1e3 * alone:.2f} = {whole / alone:.3f}",
            flush=True,
        )


def _tiles(cu: np.ndarray) -> np.ndarray:
    start, stop = cu[:-1], cu[1:]
    return np.stack([start, stop, start, stop, 0 * start, np.full_like(start, bands.NO_LIMIT)], axis=1)


def named(kernel: ModuleType) -> str:
    engine = type(kernel._installed()).__name__ if hasattr(kernel, "_installed") else "aten"
    return f"{kernel.__name__.rpartition('.')[2]} kernel ({engine})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes and few tests: to try the script")
    parser.add_argument("--kernel", help="by name, the device's by default")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no GPU here that torch can use, so nothing was run; --device cpu --quick tries the script itself."
        )
        sys.exit(2)
    begin, device, sizes = time.perf_counter(), torch.device(asked.device), QUICK if asked.quick else FULL
    kernel = kernel_for(device, asked.kernel)
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {named(kernel)}")
    failed = contract(asked.quick)
    throughput(kernel, sizes, device)
    overhead(kernel, sizes, device)
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
