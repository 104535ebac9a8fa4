"""pack_dataset: a dataset whose rows are packs, made once, saved and reloaded by ``datasets``.

    packed = pack_dataset(dataset, "static", max_tokens=8192, num_proc=8)
    packed.save_to_disk("packed")                       # load_from_disk("packed") in the training job

For trainers that take rows as they are. Decided once and for all epochs are the packs, by the recipe's packing; who trains
on them when is left to the trainer (``BalancedLoader`` decides both anew in every epoch, and by cost). Documents are packed
over the whole dataset at once or window by window (``samplers/epoch_packs.py``), never by the batches in which they happen to be
mapped.

Cost: planning takes a second for some million documents. Laying out is one pass over the tokens, in ``num_proc`` processes,
some dozen packs at a time; a token takes 12 bytes on disk (``input_ids``, ``labels``, ``position_ids``, int32 each) and what
other columns take. Results are cached by ``datasets`` under a fingerprint of the packs and of all that they follow from.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from ..packing.packs import Packs
from ..packing.queues import WlbQueues
from ..recipes import Recipe, choose
from ..samplers.batch_sampler import BalancedBatchSampler
from ..samplers.epoch_packs import packs_of, shortest_of
from .dataset import PlannedDataset
from .pack_layout import PackLayout, packs_table

if TYPE_CHECKING:
    from datasets import Dataset

    from ..samplers.solve import Cost

WHOLE = 1 << 40  # documents of a window that holds any dataset
LAYOUT_VERSION = 1  # in the fingerprint: to be raised when the same packs are laid out otherwise
TOKENS_AT_ONCE = 1 << 18


def pack_dataset(
    dataset: Any,
    recipe: Recipe | str = "static",
    *,
    max_tokens: int,
    window: int | None = None,
    num_proc: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    too_long: str = "error",
    group_key: str | None = None,
    cost: Cost | None = None,
    shift_labels: bool = True,
    restart_positions: bool = False,
) -> Dataset:
    """A HF ``Dataset`` with one row per pack.

    Columns, all lists: ``input_ids``, ``labels``, ``position_ids`` (int32, one per token), ``seq_lengths`` (int32, one per
    document), ``cu_seqlens`` (int32, the boundaries, one more), ``doc_ids`` (int64, numbers of the documents in
    ``dataset``), and every other column of ``dataset``: token-aligned ones cut like the tokens, others one value per
    document. An ``attention_mask`` of ones is left out: beside boundaries it says nothing, and some models would prefer it.
    ``info.description`` tells what was packed, dropped and cut.

    Args:
        dataset: HF ``Dataset`` with a column ``input_ids`` (and optionally ``labels``, unshifted, -100 = masked), or any
            source or map-style dataset of such rows.
        recipe: by whose packing: ``static`` (best fit decreasing; few packs), ``recipe("static", pack="concat")`` (no
            padding, documents cut at the edge), ``wlb`` (like workload).
        max_tokens: hard cap of a pack.
        window: documents that are packed together, in the order in which they are admitted; None: all.
        num_proc: processes that lay out; None: this one.
        seed, shuffle: order in which documents are admitted and packs come; ``shuffle=False``: as they are in ``dataset``,
            as far as packs allow.
        too_long: documents of more than ``max_tokens``: ``error``, ``drop``, ``truncate``, ``split``.
        group_key: column whose equal values keep documents together in one pack; needs ``window=None``.
        cost: what ``wlb`` balances, seconds from (pairs, tokens); default: a dense 7B model.
        shift_labels: True: the label of a token is the next token of its document, -100 at its last (what HF models take as
            ``shift_labels``, and Megatron as ``labels``). False: it is the token itself, -100 at the first of a document: for
            models that shift labels themselves; where a document is cut, the target behind the cut is then lost.
        restart_positions: pieces of a split document count positions from 0. Models that find boundaries by positions that
            fall to 0 (HF's without a flash-attention kernel) need it wherever documents are split or cut.

    Raises ValueError.

        >>> from datasets import Dataset, disable_progress_bars
        >>> disable_progress_bars()
        >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]], "name": ["a", "b", "c"]})
        >>> packed = pack_dataset(rows, max_tokens=5, shuffle=False)
        >>> packed["input_ids"][:], packed["labels"][1], packed["seq_lengths"][:], packed["name"][:]
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9]], [7, 8, 9, -100], [[3, 2], [4]], [['a', 'b'], ['c']])
    """
    _check_window(window, group_key)
    data = PlannedDataset(dataset)
    lengths = data.lengths(group_key)
    if lengths.masks is not None:
        raise ValueError(
            f"packed rows say nothing of masks, and these documents have {lengths.masks.kind} masks: use BalancedLoader"
        )
    sampler = BalancedBatchSampler(
        lengths,
        _fitting(choose(recipe), whole=window is None),
        max_tokens_per_rank=max_tokens,
        dp=1,
        documents_per_step=window or WHOLE,
        seed=seed,
        shuffle=shuffle,
        order="shuffle" if shuffle else "preserve",
        too_long=too_long,
        cost=cost,
        count_targets=False,
    )
    filling = window is not None and sampler.recipe.pack in ("best_fit", "concat")
    packs = packs_of(sampler, shortest_of(lengths, sampler, too_long) if filling else None)
    layout = PackLayout(
        data=data,
        types=_types(dataset),
        document_stop=max_tokens if too_long == "truncate" else 0,
        shift_labels=shift_labels,
        restart_positions=restart_positions,
    )
    return _laid_out(dataset, packs, sampler, window, layout, num_proc)


def _check_window(window: int | None, group_key: str | None) -> None:
    """Raises ValueError unless documents can be packed so many at a time."""
    if window is None:
        return
    if int(window) != window or window < 1:
        raise ValueError(
            f"window is a whole number of documents of at least 1, or None for all of them; got {window!r}"
        )
    if group_key is not None:
        raise ValueError("documents of a group may not be parted by windows: use group_key with window=None")


def _laid_out(
    dataset: Any,
    packs: Packs,
    sampler: BalancedBatchSampler,
    window: int | None,
    layout: PackLayout,
    num_proc: int | None,
) -> Dataset:
    """The dataset of these packs: a table of their spans, mapped to their tokens."""
    from datasets import Dataset, DatasetInfo, Features

    table = packs_table(packs, sampler.items.document_tokens(packs.spans.document))
    first = layout(table.slice(0, 1))  # what is wrong with a column is said before processes start
    told = _told(packs, sampler, window, layout)
    planned = Dataset(table, info=DatasetInfo(description=told), split=getattr(dataset, "split", None))
    fingerprint, cache = _cache(dataset, packs, told, sampler.config, layout)
    mapped = planned.with_format("arrow").map(
        layout,
        batched=True,
        batch_size=max(1, TOKENS_AT_ONCE // sampler.cluster.capacity),
        num_proc=num_proc,
        remove_columns=planned.column_names,
        features=Features.from_arrow_schema(first.schema),
        new_fingerprint=fingerprint,
        cache_file_name=cache,
        desc=f"Packing into {sampler.cluster.capacity}",
    )
    return mapped.with_format(None)


def _fitting(recipe: Recipe, *, whole: bool) -> Recipe:
    """The recipe, if its packs are those of one rank; without queues where there is no later window to wait for."""
    if not recipe.one_size:
        raise ValueError(
            f"recipe {recipe.name!r} makes packs for the ranks of one step; packs to be kept are made by a recipe with pack="
            f"'best_fit', 'concat', 'wlb' or 'gds': use 'static' or 'wlb', or train through BalancedLoader"
        )
    if whole and isinstance(recipe.options, WlbQueues):
        return replace(recipe, options=replace(recipe.options, max_delay=0))
    return recipe


def _types(dataset: Any) -> dict[str, pa.DataType]:
    """Arrow types of the columns of a HF dataset, for what is not token-aligned to keep."""
    features = getattr(dataset, "features", None)
    return {} if features is None else {field.name: field.type for field in features.arrow_schema}


def _told(packs: Packs, sampler: BalancedBatchSampler, window: int | None, layout: PackLayout) -> str:
    """What was packed, dropped and cut, in a few sentences."""
    tokens, capacity = packs.tokens, sampler.cluster.capacity
    mask = "attention_mask" in layout.data.rows(packs.spans.document[:1].tolist())
    return (
        f"{sampler.items.describe()}. Packed by recipe {sampler.recipe.name!r}, "
        f"{'all at once' if window is None else f'{window} documents at a time'}, into {len(packs)} packs of at most {capacity} "
        f"tokens: {tokens.sum() / (len(packs) * capacity):.2%} filled, max/mean tokens {tokens.max() / tokens.mean():.3f}. "
        f"Labels are {'shifted: that of a token is the next one' if layout.shift_labels else 'not shifted: the model does it'}; "
        f"positions of a piece {'restart at 0' if layout.restart_positions else 'continue'}."
        + (" Left out: attention_mask, ones throughout." if mask else "")
    )


def _cache(dataset: Any, packs: Packs, told: str, config: dict, layout: PackLayout) -> tuple[str, str | None]:
    """Fingerprint of the result, and the file that ``datasets`` keeps it in; None: in memory, like ``dataset`` itself.

    A source that ``datasets`` did not make has no fingerprint of its own contents: its packs are never taken from a cache,
    and lie in a file that is removed at exit.
    """
    from datasets import is_caching_enabled
    from datasets.fingerprint import generate_random_fingerprint, get_temporary_cache_files_directory

    own = getattr(dataset, "_fingerprint", None)
    follows_from = (LAYOUT_VERSION, own, told, config, layout.shift_labels, layout.restart_positions)
    state = xxhash.xxh3_128(repr(follows_from).encode())
    for values in (packs.spans.document, packs.spans.start, packs.spans.stop, packs.offsets):
        state.update(np.ascontiguousarray(values).data)
    fingerprint = state.hexdigest() if own is not None else generate_random_fingerprint()
    kept_in = getattr(dataset, "cache_files", None)
    if own is not None and not kept_in:
        return fingerprint, None
    if kept_in and is_caching_enabled():
        return fingerprint, os.path.join(os.path.dirname(kept_in[0]["filename"]), f"cache-{fingerprint}.arrow")
    name = f"cache-{generate_random_fingerprint()}.arrow"
    return fingerprint, os.path.join(get_temporary_cache_files_directory(), name)
