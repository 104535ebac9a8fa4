"""Exchange: what ranks tell each other about a stream, and how documents come from the rank that read them to those that need
them. On the CPU, over a gloo group that nothing else uses; without a group there is one rank, and nothing travels.

Lengths go to all ranks, two numbers a document, and with them a note where there is something to say: an error becomes the
same error everywhere, in the step where it came. Documents go by one all-to-all, whole and with all their columns, as Arrow
record batches (``wire.py``), never pickled; what arrives are views of the bytes received, and what a rank sends to itself is
not touched. A gloo all-to-all of some MiB takes milliseconds; its latency is half of one.

    >>> told, notes = gather(np.array([[5, 4], [3, 2]]), most=3, note="", group=None)
    >>> told[0].tolist(), notes
    ([[5, 4], [3, 2]], [''])
    >>> move_rows([{"input_ids": [np.array([7, 8])]}], group=None)
    [{'input_ids': [array([7, 8])]}]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..packing.packs import Int64
from .dataset import Rows
from .wire import decode, encode


def world_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in the group, and its ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gather(values: Int64, *, most: int, note: str, group: dist.ProcessGroup | None) -> tuple[list[Int64], list[str]]:
    """What every rank tells, by rank: its values int64[k, 2] and its note.

    Args:
        values: of this rank, k at most ``most``, which is the same number on all ranks.
        note: text that is seldom there; it costs a second exchange.
    """
    if group is None:
        return [values], [note]
    text = note.encode()
    mine = torch.zeros(2 + 2 * most, dtype=torch.int64)
    mine[0], mine[1] = len(values), len(text)
    mine[2 : 2 + values.size] = torch.from_numpy(np.ascontiguousarray(values, np.int64).reshape(-1))
    all_told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_told, mine, group=group)
    told = [each[2 : 2 + 2 * int(each[0])].view(-1, 2).numpy() for each in all_told]
    sizes = [int(each[1]) for each in all_told]
    return told, _texts(text, sizes, group) if any(sizes) else [""] * len(sizes)


def share(note: str, group: dist.ProcessGroup | None) -> list[str]:
    """A note of every rank, by rank."""
    return gather(np.zeros((0, 2), np.int64), most=0, note=note, group=group)[1]


def _texts(mine: bytes, sizes: Sequence[int], group: dist.ProcessGroup) -> list[str]:
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
    told = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(told, padded, group=group)
    return [bytes(each[:size].numpy()).decode() for each, size in zip(told, sizes, strict=True)]


def move_rows(outgoing: Sequence[Rows], group: dist.ProcessGroup | None) -> list[Rows]:
    """Documents sent to each rank → documents received from each. No documents ({}) are legal anywhere.

    Arrays that arrive from others are views of one buffer; those of this rank are what it gave.
    """
    rank, world = world_of(group)
    assert len(outgoing) == world, f"rows for {len(outgoing)} of {world} ranks"
    if group is None:
        return [outgoing[0]]
    parcels = [encode(rows) if to != rank else np.zeros(0, np.uint8) for to, rows in enumerate(outgoing)]
    sizes = torch.tensor([len(parcel) for parcel in parcels])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    buffer = torch.empty(int(coming.sum()), dtype=torch.uint8)
    sent = torch.from_numpy(np.concatenate(parcels))
    dist.all_to_all_single(buffer, sent, coming.tolist(), sizes.tolist(), group=group)
    received = np.split(buffer.numpy(), np.cumsum(coming.numpy())[:-1])  # aligned: each is a multiple of eight bytes
    return [outgoing[rank] if sender == rank else decode(data) for sender, data in enumerate(received)]
