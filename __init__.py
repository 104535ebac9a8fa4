"""equipoise: balanced batches for long-context training.

    >>> import equipoise                                    # milliseconds: nothing heavy is imported yet
    >>> equipoise.recipe("wlb").pack
    'wlb'

Names are imported when first used (PEP 562), so planning code never pays for torch.
"""

from __future__ import annotations

__version__ = "0.1.0"

# name -> module that defines it. Strings, so that this file imports nothing of its own package: a test runner may
# import it a second time under the checkout folder's name.
_HOMES = {
    "Lengths": "packing.lengths",
    "CostModel": "packing.cost",
    "Hardware": "packing.cost",
    "ModelShape": "packing.cost",
    "Packs": "packing.packs",
    "Spans": "packing.packs",
    "Shards": "packing.shards",
    "Mask": "packing.masks",
    "MaskColumns": "packing.mask_columns",
    "Ragged": "packing.mask_kinds",
    "StepPlan": "samplers.plan",
    "BalancedBatchSampler": "samplers.batch_sampler",
    "Recipe": "recipes",
    "recipe": "recipes",
    "plan": "recipes",
    "AttentionPlan": "attention.plan",
    "CpGroups": "attention.groups",
    "attend": "attention.executor",
    "register_attention": "attention.hf",
    "run_chunks": "attention.chunk_run",
    "gather_documents": "attention.documents",
    "BalancedLoader": "loaders.loader",
    "Shapes": "loaders.shapes",
    "PlannedDataset": "loaders.dataset",
    "Mixture": "loaders.mixture",
    "Stream": "loaders.stream",
    "TokenFile": "loaders.token_files",
    "TarShards": "loaders.tar",
    "index_shards": "loaders.tar_index",
    "open_source": "loaders.paths",
    "pack_dataset": "loaders.pack_dataset",
    "ThdBatch": "loaders.batch",
    "ThdCollator": "loaders.collate",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
