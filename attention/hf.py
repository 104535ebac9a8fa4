"""Hugging Face: an unmodified model attends under a plan.

transformers passes extra keyword arguments of `model(...)` on to its attention function, under gradient checkpointing
too, so the plan travels with the batch and nothing is global but the registered name. What a layer asks for of its own is
passed on, so that layers of all kinds share the batch's plan: a sliding window (Mistral, Qwen2, Gemma), capped scores
(Gemma 2, where the kernel can), attention sinks (gpt-oss), values of another head dim (DeepSeek). Whatever would make the
model attend to something else than the plan says is refused: a mask, a KV cache, dropout.

    >>> register_attention(CpGroups(dp=1, cp=1))                                               # once, on every rank
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="equipoise")    # doctest: +SKIP
    >>> model(**batch.to_hf())                                                                 # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .chunked import Chunk, attend_chunk
from .executor import attend
from .groups import CpGroups


def register_attention(groups: CpGroups, name: str = "equipoise", *, kernel: str | None = None) -> None:
    """Make `attn_implementation=name` attend under the `plan` that `model(input_ids=[1, T], position_ids=[1, T], plan=…,
    use_cache=False)` is given, T being this rank's tokens in the order it holds them.

    groups: those of this run. kernel: a backend by name (kernels/contract.py); None: the device's. Registering a name again
    replaces it. Raises ImportError without transformers (the `hf`
    extra), ValueError for a name that transformers would read as its own.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("register_attention needs transformers: pip install 'equipoise[hf]'.") from error
    if "flash" in name or "/" in name or "|" in name:
        raise ValueError(f'transformers treats names with "flash", "/" or "|" as kernels of its own; got {name!r}.')

    @torch.compiler.disable
    def attention(
        module: torch.nn.Module,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        plan = options.get("plan")
        if plan is None:
            raise ValueError(f'attn_implementation="{name}" attends under a plan: call model(..., plan=...); got none.')
        _refuse(query_BHTD, key_BKTD, attention_mask, dropout, options)
        q, k, v = (x[0].transpose(0, 1) for x in _one_dtype(query_BHTD, key_BKTD, value_BKTD))
        asked: dict[str, Any] = {
            "window": options.get("sliding_window"),
            "softcap": options.get("softcap"),
            "sinks_H": options.get("s_aux"),
            "kernel": kernel,
        }
        if isinstance(plan, Chunk):
            return attend_chunk(plan, _layer_of(module), q, k, v, groups, scaling, **asked)[None], None
        return attend(plan, q, k, v, groups, scaling, **asked)[None], None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)


def _layer_of(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError(
            f"Chunks of a document keep keys and values by layer, and {type(module).__name__} has no layer_idx."
        )
    return layer


def _refuse(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    """ValueError for what the plan knows nothing of."""
    if query.shape[0] != 1:
        raise ValueError(f"A pack is one row, input_ids [1, tokens]; got a batch of {query.shape[0]}.")
    if mask is not None:
        raise ValueError(f"The plan is the mask; got an attention_mask {list(mask.shape)} beside it. Leave it out.")
    if options.get("use_cache") or query.shape[2] != key.shape[2]:
        raise ValueError("A plan knows no KV cache; call model(..., use_cache=False) and pass no cache.")
    if dropout:
        raise ValueError(f"Attention dropout is not supported; got {dropout}. Set attention_dropout=0 in the config.")


def _no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """The mask function of our name: without one, transformers would drop a user's mask in silence."""
    if attention_mask is not None:
        raise ValueError(
            f"The plan is the mask; got an attention_mask {list(attention_mask.shape)} beside it. Leave it out: "
            "padding is no document of the pack, and documents are kept apart by the plan."
        )


def _one_dtype(*parts: Tensor) -> list[Tensor]:
    """Under autocast norms may leave q and k in fp32 beside v in bf16; attention runs in the autocast dtype."""
    device = parts[0].device.type
    if torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in parts]
    return list(parts)
