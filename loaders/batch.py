"""ThdBatch: what one rank trains on in one slot, tokens of several documents laid end to end (T, no batch dimension).

A read-only mapping whose entries are attributes too. It carries the tokens this rank holds and metadata of the whole
pack: ``cu_seqlens`` are the pack's (never divided by cp), ``shard_index`` says which of its positions this rank holds.

    for batch in loader:
        loss = model(**batch.to_hf()).loss          # exact: already scaled by the targets of the whole step
        loss.backward()
        if batch.is_last_slot:
            optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

FIELDS = {
    "input_ids": "int64[t] token ids this rank holds",
    "labels": "int64[t] the next token of the same document, -100 where there is none or it is masked",
    "position_ids": "int64[t] position within the document",
    "doc_ids": "int32[t] which document of the pack, 0 …",
    "shard_index": "int64[t] position within the pack of each token held",
    "cu_seqlens": "int32[d+1] document boundaries of the whole pack",
    "max_seqlen": "longest document of the pack",
    "layout": "name of the shard rule",
    "plan": "how its ranks attend; None where the recipe leaves that to you",
    "cp_size": "ranks that share the pack",
    "cp_rank": "this rank among them",
    "cp_ranks": "their numbers in the dp x cp plane",
    "num_targets": "labels on this rank that are not -100",
    "num_targets_step": "the same over all ranks and slots of the step: the denominator of the loss",
    "num_ranks": "ranks of the dp x cp plane",
    "sum_len": "tokens of the pack's real documents",
    "sum_len_sq": "sum of their squared lengths",
    "documents": "int64[d] their numbers in the dataset, -1 for a filler",
    "starts": "int64[d] where in the document each piece begins",
    "epoch": "epoch",
    "step": "optimizer step of the epoch",
    "slot": "micro-batch of the step",
    "num_slots": "micro-batches of the step, alike on all ranks",
    "digest": "hash of the step's plan, alike on all ranks",
    "cost": "predicted seconds of this micro-batch on this rank",
    "planning_seconds": "what planning the step took",
    "resume": "state behind this micro-batch",
}


class ThdBatch(Mapping[str, Any]):
    """One rank's micro-batch: the entries of ``FIELDS``, then the dataset's other columns under their own names.

    Token-aligned columns are tensors cut like the tokens; columns with one value per document hold one per document of
    the pack (a tensor for numbers, else a list). Built from a mapping, so that torch's pinning and accelerate's moving,
    which rebuild a mapping entry by entry, give a ThdBatch again.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(
                f"ThdBatch has no entry {name!r}; it has {', '.join(self.__dict__.get('_fields', ()))}"
            )
        return self._fields[name]

    def replace(self, **entries: Any) -> ThdBatch:
        """A copy with these entries set."""
        return ThdBatch({**self._fields, **entries})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ThdBatch:
        """A copy with every tensor on ``device``; ``cu_seqlens`` too."""
        return ThdBatch(
            {
                name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
                for name, value in self._fields.items()
            }
        )

    @property
    def is_last_slot(self) -> bool:
        """Whether the optimizer steps after this micro-batch (the one without ``no_sync``)."""
        return self.slot == self.num_slots - 1

    def loss_scale(self, reduction: str = "mean", world: int | None = None) -> float:
        """Factor for this rank's *sum* of token losses, so that gradients are those of the step's mean over targets.

        Args:
            reduction: how gradients are reduced over ranks: ``mean`` (DDP, FSDP) or ``sum`` (Megatron).
            world: ranks that ``mean`` divides by; default: all of the dp x cp plane.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' (DDP, FSDP) or 'sum' (Megatron); got {reduction!r}")
        if self.num_targets_step is None:
            raise ValueError(
                "the step's target count is not known: it is all-reduced by BalancedLoader; with your own DataLoader give "
                "the sampler lengths with targets, or sum batch.num_targets over ranks and slots yourself"
            )
        if self.num_targets_step == 0:
            return 0.0
        return (1 if reduction == "sum" else world or self.num_ranks) / self.num_targets_step

    def to_hf(self, reduction: str = "mean", world: int | None = None) -> dict[str, Any]:
        """Keyword arguments for an unmodified HF causal LM: ``model(**batch.to_hf()).loss`` is ready for backward.

        Labels are handed over as ``shift_labels`` too, so that nothing shifts them again, and ``num_items_in_batch`` makes
        HF divide the sum of token losses by what ``loss_scale`` asks for. The attention plan, if any, reaches the
        attention registered by ``register_attention``; without one the flash-attention names of the boundaries are given.
        """
        scale = self.loss_scale(reduction, world)
        labels = self.labels[None]
        arguments = {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "labels": labels,
            "shift_labels": labels,
            "num_items_in_batch": 1 / scale if scale else float("inf"),
            "use_cache": False,
        }
        if self.plan is not None:
            return {**arguments, "plan": self.plan}
        ends = {"cu_seq_lens_q": self.cu_seqlens, "cu_seq_lens_k": self.cu_seqlens}
        return {**arguments, **ends, "max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen}

    def state(self) -> dict:
        """What ``load_state_dict`` needs to continue behind this micro-batch; equal on all ranks, plain JSON."""
        return self.resume

    def describe(self) -> str:
        """Where it belongs and what it holds, in a line."""
        return (
            f"ThdBatch(epoch {self.epoch}, step {self.step}, slot {self.slot + 1}/{self.num_slots}: "
            f"{self.input_ids.numel()} of {self.sum_len} tokens of {len(self.documents)} documents, cp rank "
            f"{self.cp_rank}/{self.cp_size} ({self.layout}), {self.num_targets} targets of "
            f"{self.num_targets_step} in the step, {self.cost:.3g} s predicted)"
        )

    __repr__ = describe
