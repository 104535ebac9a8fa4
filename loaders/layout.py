"""Layout: what follows from a batch's token ids and its segments, made when it is first read; and what masking changes.

A segment is a run of tokens of one document. Positions, document numbers, places in the pack and, where the tokens are
their own labels, the labels too follow from a few numbers per segment, so a worker sends those and not 28 bytes a token.

    >>> fields = {"input_ids": torch.tensor([5, 6, 9]), "segments": torch.tensor([[0, 0, 0, 2], [1, 4, 2, 1]]),
    ...           "behind": torch.tensor([-100, 7])}
    >>> made = lay_out(fields)
    >>> made["labels"].tolist(), made["position_ids"].tolist()
    ([6, -100, 7], [0, 1, 4])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numba import njit

IGNORE = -100
PADDING = -101  # what is behind a segment of padding or of a filler: none of its tokens has a label
LAID_OUT = frozenset({"position_ids", "doc_ids", "shard_index"})


def lay_out(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """position_ids, doc_ids, shard_index and, unless given, labels: from ``input_ids``, ``segments`` and ``behind``."""
    ids = fields["input_ids"]
    made: dict[str, torch.Tensor] = {
        "position_ids": torch.empty_like(ids),
        "shard_index": torch.empty_like(ids),
        "doc_ids": torch.empty(len(ids), dtype=torch.int32),
    }
    if "labels" not in fields:
        made["labels"] = torch.empty_like(ids)
    labels = made.get("labels", ids[:0]).numpy()
    segments, behind = fields["segments"].numpy(), fields["behind"].numpy()
    _fill(
        ids.numpy(),
        segments,
        behind,
        made["position_ids"].numpy(),
        made["shard_index"].numpy(),
        made["doc_ids"].numpy(),
        labels,
    )
    return made


@njit(nogil=True, cache=True)
def _fill(ids, segments, behind, position_ids, shard_index, doc_ids, labels):
    at = 0
    for segment in range(len(segments)):
        document, position, place, tokens = segments[segment]
        # One loop for each array, over a slice that begins at 0: such loops become vector instructions.
        run = position_ids[at : at + tokens]
        for offset in range(len(run)):
            run[offset] = position + offset
        run = shard_index[at : at + tokens]
        for offset in range(len(run)):
            run[offset] = place + offset
        doc_ids[at : at + tokens] = document
        if len(labels) and behind[segment] == PADDING:
            labels[at : at + tokens] = IGNORE
        elif len(labels) and tokens:
            labels[at : at + tokens - 1] = ids[at + 1 : at + tokens]
            labels[at + tokens - 1] = behind[segment]
        at += tokens


def num_targets(tokens: np.ndarray, behind: np.ndarray) -> int:
    """Labels of segments of ``tokens`` int64[s] that are their tokens, the last one's being ``behind`` int64[s]."""
    return int((tokens - (behind == IGNORE))[behind != PADDING].sum())


def masked(fields: Mapping[str, Any], documents: Collection[int], reason: str) -> dict[str, Any]:
    """The entries that change when these documents of the dataset become fillers; none where the batch holds none of them."""
    numbers = fields["documents"].numpy()
    gone = np.isin(numbers, list(documents)) & (numbers >= 0)
    if not gone.any():
        return {}
    segments, behind = fields["segments"].numpy(), fields["behind"].numpy().copy()
    lost = gone[segments[:, 0]]
    tokens = torch.from_numpy(np.repeat(lost, segments[:, 3]))
    changed = {"input_ids": fields["input_ids"].masked_fill(tokens, 0)}
    if "shifted_labels" in fields:
        changed["shifted_labels"] = fields["shifted_labels"].masked_fill(tokens, IGNORE)
    if "labels" in fields:
        changed["labels"] = fields["labels"].masked_fill(tokens, IGNORE)
        targets = int((changed["labels"] != IGNORE).sum())
    else:
        targets = fields["num_targets"] - num_targets(segments[lost, 3], behind[lost])
    behind[lost] = PADDING
    length = np.diff(fields["cu_seqlens"].numpy()[: len(numbers) + 1].astype(np.int64))[(numbers >= 0) & ~gone]
    told = tuple((document, reason) for document in dict.fromkeys(numbers[gone].tolist()))
    return {
        **changed,
        "behind": torch.from_numpy(behind),
        "documents": torch.from_numpy(np.where(gone, -1, numbers)),
        "num_targets": targets,
        "sum_len": int(length.sum()),
        "sum_len_sq": int((length * length).sum()),
        "skipped": fields["skipped"] + told,
    }
