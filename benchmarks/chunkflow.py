"""What ChunkFlow's chunks cost and spare: activation memory, the store, and time, by the document's length and K.

    python benchmarks/chunkflow.py [--chunk 256] [--chunks 4,8,16] [--keep 1,2,4] [--repeat 3]

One document through a small Qwen3, forward and backward, as a whole and in chunks. Saved: bytes that autograd keeps at
most (`SavedBytes`; parameters left out). Store: keys, values and their gradients. Time: median of runs that take turns,
beside the whole document's; a chunk is computed forward twice, so 4/3 would be all of it with K = 1.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from equipoise import BalancedLoader, CpGroups, recipe, register_attention
from equipoise.attention.chunk_run import run_chunks
from equipoise.attention.kv_store import store_bytes
from equipoise.attention.saved_bytes import SavedBytes
from equipoise.samplers.solve import ChunkFlow
from transformers import Qwen3Config, Qwen3ForCausalLM


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1 << 20,
            attn_implementation="equipoise",
        )
    )


def batches(tokens: int, chunk_tokens: int) -> list:
    """One document's chunks."""
    ids = np.random.default_rng(tokens).integers(0, 1024, tokens)
    loader = BalancedLoader(
        [{"input_ids": ids}],
        recipe("chunkflow", options=ChunkFlow(chunk_tokens=chunk_tokens)),
        max_tokens_per_rank=chunk_tokens,
        documents_per_step=1,
        dp=1,
        rank=0,
    )
    made = list(next(loader.steps()))
    loader.close()
    return made


def step(net: torch.nn.Module, made: list, keep: int) -> tuple[float, int]:
    """Seconds, and most bytes saved, of forward and backward."""
    net.zero_grad()
    begin = time.perf_counter()
    run_chunks(net, made, keep=keep)
    seconds = time.perf_counter() - begin
    with SavedBytes(net) as saved:
        run_chunks(net, made, keep=keep)
    return seconds, saved.most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--chunks", default="4,8,16", help="chunks of the document")
    parser.add_argument("--keep", default="1,2,4", help="K: chunks that keep their activations")
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    register_attention(CpGroups(dp=1, cp=1))
    net = model()
    keeps = [int(keep) for keep in asked.keep.split(",")]
    print(f"{'tokens':>8} {'chunks':>7} {'K':>6} {'saved MiB':>10} {'store MiB':>10} {'of whole':>9} {'time':>6}")
    for count in map(int, asked.chunks.split(",")):
        tokens = count * asked.chunk
        cases = {None: (batches(tokens, tokens), 1)}
        cases |= {keep: (batches(tokens, asked.chunk), keep) for keep in keeps if keep <= count}
        runs = [{keep: step(net, *case) for keep, case in cases.items()} for _ in range(asked.repeat)]
        seconds = {keep: statistics.median(run[keep][0] for run in runs) for keep in cases}
        for keep in cases:
            saved = runs[0][keep][1]
            store = 0 if keep is None else store_bytes(net.config, tokens, torch.float32)
            print(
                f"{tokens:8} {1 if keep is None else count:7} {keep or 'whole':>6} {saved / 2**20:10.2f} "
                f"{store / 2**20:10.2f} {(saved + store) / runs[0][None][1]:9.3f} {seconds[keep] / seconds[None]:6.2f}"
            )


if __name__ == "__main__":
    main()
