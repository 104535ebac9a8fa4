"""ring-flash-attn's own distributed tests on CPU, once over it and once over equipoise under its names.

    pip download --no-deps --no-binary :all: ring-flash-attn==0.1.8 && tar xzf ring_flash_attn-0.1.8.tar.gz
    pip install --no-deps ring-flash-attn==0.1.8
    python benchmarks/peer_tests.py ring_flash_attn-0.1.8/test [--ranks 2]

Its tests are scripts for torchrun, NCCL and GPUs that print differences to flash-attention and assert nothing. Here each runs
on gloo and CPU (two words of its source are exchanged as it is read), over the stand-in for flash_attn of
`attention_peers.py`; `ring_flash_attn` is the package, then tests/attention/peers/ring_flash_attn.py. The differences that it
prints are shown side by side, the largest of any rank, and the run fails (exit 1) where ours is larger than twice theirs and
bf16's own step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from attention_peers import install
from equipoise.attention.kernels import cpu

ROOT = Path(__file__).parents[1]
SIDES = ("theirs", "ours")
TESTS = (
    "test_ring_flash_attn_func",
    "test_ring_flash_attn_varlen_func",
    "test_zigzag_ring_flash_attn_func",
    "test_zigzag_ring_flash_attn_varlen_func",
    "test_llama3_flash_attn_varlen_func",
    "test_stripe_flash_attn_func",
)
STEP = 2**-7
"""Between bf16 numbers near 1, which outputs and gradients are of."""


def run(test: Path, side: str, ranks: int) -> dict[str, float]:
    """Largest difference by what is compared."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__)), str(test), "--rank-of", side]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    outcomes = [process.communicate(timeout=600) for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{test.name}, {side}, failed:\n" + "\n".join(errors for _, errors in outcomes))
    found = [json.loads(text.splitlines()[-1]) for text, _ in outcomes]
    return {kind: max(x[kind] for x in found) for kind in found[0]}


def recorder(found: dict[str, float]) -> ModuleType:
    """The `utils` that their tests import and that is not in the source distribution; keeps what they print."""

    def set_seed(rank: int, seed: int = 42) -> None:
        torch.manual_seed(rank + seed)

    def log(message: str, x: torch.Tensor, rank0_only: bool = False) -> None:
        if "diff" in message:
            kind = message.split()[0]
            found[kind] = max(x.abs().max().item(), found.get(kind, 0.0))

    module = ModuleType("utils")
    module.set_seed, module.log = set_seed, log  # type: ignore[attr-defined]
    return module


def rank_of(test: Path, side: str) -> None:
    """One rank of a test, in a process of its own."""
    torch.set_num_threads(1)
    install(cpu)
    if side == "ours":
        sys.modules.pop("ring_flash_attn.adapters")
        sys.path.insert(0, str(ROOT / "tests" / "attention" / "peers"))
    found: dict[str, float] = {}
    sys.modules["utils"] = recorder(found)
    source = test.read_text().replace('"nccl"', '"gloo"').replace('f"cuda:{rank}"', '"cpu"')
    exec(compile(source, str(test), "exec"), {"__name__": "__main__", "__file__": str(test)})
    if dist.is_initialized():  # some tests end it
        dist.barrier()
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with ring-flash-attn's tests")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", choices=SIDES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        return rank_of(asked.folder, asked.rank_of)
    worse = 0
    print(f"{asked.ranks} ranks, largest difference to flash-attention on one process: theirs / ours")
    for name in TESTS:
        theirs, our = (run(asked.folder / f"{name}.py", side, asked.ranks) for side in SIDES)
        assert theirs.keys() == our.keys()
        print(f"  {name:42}" + "".join(f"  {k} {theirs[k]:.3g} / {our[k]:.3g}" for k in our), flush=True)
        worse += sum(our[k] > 2 * theirs[k] + STEP for k in our)
    print(f"{worse} differences of ours larger than allowed")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
