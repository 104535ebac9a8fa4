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

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numba import njit

from .layout import IGNORE, LAID_OUT, lay_out, masked

FIELDS = {
    "input_ids": "int64[t] token ids this rank holds",
    "labels": "int64[t] the next token of the same document, -100 where there is none or it is masked",
    "label_offsets": "how many tokens ahead the rows of ``shifted_labels`` look; both only with ``label_offsets=`` of the loader",
    "shifted_labels": "int64[k, t] as ``labels``, so many tokens ahead",
    "position_ids": "int64[t] position within the document",
    "doc_ids": "int32[t] which document of the pack, 0 …",
    "shard_index": "int64[t] position within the pack of each token held",
    "segments": "int64[s, 4] runs of tokens held: document of the pack, first position, place in the pack, tokens",
    "behind": "int64[s] the label of each run's last token",
    "cu_seqlens": "int32[d+1] document boundaries of the whole pack; with ``Shapes(max_docs=M)`` int32[M+1], the end repeated",
    "cu_seqlens_padded": "the same with padding, which positions then count; there only where it differs (or might, with M)",
    "num_docs": "d, documents of the pack, fillers included: boundaries from ``num_docs + 1`` on only repeat the end",
    "max_seqlen": "longest document of the pack, or that rounded up (``Shapes(max_seqlen_bucket=B)``)",
    "layout": "name of the shard rule",
    "pack_mask": "that of the pack's documents (a Mask); None: causal within each",
    "plan": "how its ranks attend; None where the recipe leaves that to you",
    "cp_size": "ranks that share the pack",
    "cp_rank": "this rank among them",
    "cp_ranks": "their numbers in the dp x cp plane",
    "num_targets": "labels on this rank that are not -100",
    "num_targets_step": "the same over all ranks and slots of the step: the denominator of the loss",
    "num_ranks": "ranks of the dp x cp plane",
    "pairs": "(query, key) pairs of this rank's share of attention",
    "sum_len": "tokens of the pack's real documents",
    "sum_len_sq": "sum of their squared lengths",
    "documents": "int64[d] their numbers in the dataset, -1 for a filler",
    "starts": "int64[d] where in the document each piece begins",
    "skipped": "(document, reason) of each that could not be read: a filler of its length is in its place",
    "epoch": "epoch",
    "step": "optimizer step of the epoch",
    "slot": "micro-batch of the step",
    "num_slots": "micro-batches of the step, alike on all ranks",
    "chunk": "(index, count) among the chunks of a document that was cut for ChunkFlow; None elsewhere",
    "digest": "hash of the step's plan, alike on all ranks",
    "cost": "predicted seconds of this micro-batch on this rank",
    "planning_seconds": "what planning the step took",
    "resume": "state behind this micro-batch",
}

LARGE = 1024
"""Values from which on it pays to look how many bytes hold each."""


class ThdBatch(Mapping[str, Any]):
    """One rank's micro-batch: the entries of ``FIELDS``, then the dataset's other columns under their own names.

    Token-aligned columns are tensors cut like the tokens; columns with one value per document hold one per document of
    the pack (a tensor for numbers, else a list). Built from a mapping, so that torch's pinning and accelerate's moving,
    which rebuild a mapping entry by entry, give a ThdBatch again.
    """

    def __init__(self, fields: Mapping[str, Any], *, derived: frozenset[str] = frozenset()) -> None:
        self._fields = dict(fields)
        self._derived = derived  # entries that ``lay_out`` makes from the others
        self._missing = bool(derived - set(fields))

    @classmethod
    def laid_out(cls, fields: Mapping[str, Any]) -> ThdBatch:
        """A batch from all but the entries that follow from its tokens and ``segments``: those are made when first read.

        ``labels`` are among them where ``fields`` has none.
        """
        return cls(fields, derived=LAID_OUT if "labels" in fields else LAID_OUT | {"labels"})

    def complete(self) -> ThdBatch:
        """Make what is not there yet, in place."""
        if self._missing:
            self._fields.update(lay_out(self._fields))
            self._missing = False
        return self

    def __getitem__(self, name: str) -> Any:
        if self._missing and name in self._derived:
            self.complete()
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.complete()._fields)

    def __len__(self) -> int:
        return len(self.complete()._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._fields and name not in self._derived:
            raise AttributeError(f"ThdBatch has no entry {name!r}; it has {', '.join(self)}")
        return self[name]

    def __reduce__(self) -> tuple:
        """Pickled small: what follows from ``segments`` is made again on arrival; CPU tensors are one block of bytes, whole
        numbers of large ones in as few bytes as hold them.

        Two to four bytes a token then go through a worker's pipe. A dozen tensors in shared memory would be 36, and each costs
        a handshake with a thread of the worker that waits for its interpreter lock.
        """
        sent = {name: value for name, value in self._fields.items() if name not in self._derived}
        packed = {name: _narrowed(value) for name, value in sent.items() if _packs(value)}
        names = sorted(packed, key=lambda name: -packed[name].itemsize)  # keeps every view aligned
        block = (
            np.concatenate([packed[name].reshape(-1).view(np.uint8) for name in names])
            if names
            else np.empty(0, np.uint8)
        )
        entries = [(name, packed[name].dtype, sent[name].dtype, tuple(sent[name].shape)) for name in names]
        rest = {name: None if name in packed else value for name, value in sent.items()}
        return _unpacked, (block, entries, rest, self._derived)

    def replace(self, **entries: Any) -> ThdBatch:
        """A copy with these entries set."""
        return ThdBatch({**self.complete()._fields, **entries}, derived=self._derived - set(entries))

    def without(
        self, documents: Collection[int], reason: str = "another rank of its CP group could not read it"
    ) -> ThdBatch:
        """A copy with these documents of the dataset masked as if they could not be read here either.

        Their tokens are 0, their labels -100, their ``documents`` -1; ``num_targets`` and ``sum_len`` no longer count them, and
        ``skipped`` tells. Further columns keep what was read, and ``pairs`` what attention computes all the same. The step's
        targets are for the caller to sum again.
        """
        changed = masked(self._fields, documents, reason)
        return ThdBatch({**self._fields, **changed}, derived=self._derived) if changed else self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ThdBatch:
        """A copy with every tensor on ``device``; ``cu_seqlens`` too."""
        return ThdBatch(
            {
                name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
                for name, value in self.items()
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

    def to_hf(self, reduction: str = "mean", world: int | None = None, *, seq_idx: bool = False) -> dict[str, Any]:
        """Keyword arguments for an unmodified HF causal LM: ``model(**batch.to_hf()).loss`` is ready for backward.

        Labels are handed over as ``shift_labels`` too, so that nothing shifts them again, and ``num_items_in_batch`` makes
        HF divide the sum of token losses by what ``loss_scale`` asks for. The attention plan, if any, reaches the
        attention registered by ``register_attention``; without one the flash-attention names of the boundaries are given.
        ``seq_idx``: which document of the pack each token is of too, int32[1, t]: what recurrent layers (Mamba) go by.
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
            **({"seq_idx": self.doc_ids[None]} if seq_idx else {}),
        }
        if self.plan is not None:
            return {**arguments, "plan": self.plan}
        ends = {"cu_seq_lens_q": self.cu_seqlens, "cu_seq_lens_k": self.cu_seqlens}
        return {**arguments, **ends, "max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen}

    def to_megatron(self) -> dict[str, Any]:
        """The same under Megatron-LM's names: a loss mask for -100, and what its ``PackedSeqParams`` takes (THD).

        Loss: sum of ``loss_mask * loss`` times ``loss_scale("sum")``, since Megatron sums gradients.
        """
        mask, padded = self.labels != IGNORE, self._fields.get("cu_seqlens_padded")
        return {
            "tokens": self.input_ids[None],
            "labels": self.labels.where(mask, 0)[None],
            "loss_mask": mask.float()[None],
            "position_ids": self.position_ids[None],
            "packed_seq_params": {
                **(
                    dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded) if padded is not None else {}
                ),
                "qkv_format": "thd",
                "cu_seqlens_q": self.cu_seqlens,
                "cu_seqlens_kv": self.cu_seqlens,
                "max_seqlen_q": self.max_seqlen,
                "max_seqlen_kv": self.max_seqlen,
                "local_cp_size": self.cp_size,
            },
        }

    def state(self) -> dict:
        """What ``load_state_dict`` needs to continue behind this micro-batch; equal on all ranks, plain JSON."""
        return self.resume

    def describe(self) -> str:
        """Where it belongs and what it holds, in a line."""
        return (
            f"ThdBatch(epoch {self.epoch}, step {self.step}, slot {self.slot + 1}/{self.num_slots}: "
            f"{self.input_ids.numel()} of {self.sum_len} tokens of {int((self.documents >= 0).sum())} documents, cp rank "
            f"{self.cp_rank}/{self.cp_size} ({self.layout}), {self.num_targets} targets of "
            f"{self.num_targets_step} in the step, {self.cost:.3g} s predicted)"
        )

    __repr__ = describe


def _packs(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and not value.requires_grad
        and value.dtype is not torch.bfloat16  # numpy has no such type
    )


def _narrowed(tensor: torch.Tensor) -> np.ndarray:
    """The values as they are, or of a large tensor in the smallest of uint16, int32 and int64 that holds them all."""
    values = np.ascontiguousarray(tensor.numpy())
    if values.dtype != np.int64 or values.size < LARGE:
        return values
    flat = values.reshape(-1)
    for kind in (np.uint16, np.int32):
        narrow = np.empty(len(flat), kind)
        if _fits(flat, narrow):
            return narrow.reshape(values.shape)
    return values


@njit(nogil=True, cache=True)
def _fits(values, narrow):
    """Copy, and tell whether every value is what was copied."""
    changed = 0
    for at in range(len(values)):
        narrow[at] = values[at]
        changed |= values[at] ^ np.int64(narrow[at])
    return changed == 0


def _unpacked(block: np.ndarray, entries: list, fields: dict[str, Any], derived: frozenset[str]) -> ThdBatch:
    at = 0
    for name, narrow, dtype, shape in entries:
        size = math.prod(shape) * narrow.itemsize
        values = torch.from_numpy(block[at : at + size].view(narrow))
        fields[name] = (values if values.dtype is dtype else values.to(dtype)).view(shape)
        at += size
    return ThdBatch.laid_out(fields) if derived else ThdBatch(fields)
