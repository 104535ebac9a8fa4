"""Documents with masks of their own, from columns through loader, plan and an unmodified HF model: a step equals one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equipoise import BalancedLoader, CpGroups, MaskColumns, recipe, register_attention
from equipoise.attention.blocks import Blocks
from equipoise.attention.tiles import Tap
from equipoise.loaders.shapes import Shapes
from equipoise.packing.mask_kinds import Ragged
from torch.nn.parallel import DistributedDataParallel

from tests.test_training import VOCAB, model, one_process, sum_of_losses

TOKENS = np.array([1, 2, 3, 13, 7, 1, 45, 29, 17, 2, 40, 5])
MASKS = [
    MaskColumns("shared_question", {"question": TOKENS - 2 * (TOKENS // 3), "answers": Ragged.of([[n // 3] * 2 for n in TOKENS])}),
    MaskColumns("window_with_sinks", {"lengths": TOKENS, "window": 4, "sinks": 2}),
    MaskColumns("prefix_lm", {"lengths": TOKENS, "prefix": TOKENS // 2}),
]  # fmt: skip
RECIPES = [
    recipe("magi"),
    recipe("dcp", blocks=Blocks(block=8, head_groups=2)),
    recipe("vrsp", attend="groupcast"),
    recipe("static", shard="joint", attend="groupcast"),
    recipe("dynamic_cp", attend="groupcast"),
    recipe("libra", tap=Tap(head_groups=2, block=4, tolerance=1)),
]


def documents() -> list[dict]:
    rng = np.random.default_rng(0)
    return [{"input_ids": ids, "labels": ids} for ids in (rng.integers(0, VOCAB, n) for n in TOKENS)]


def all_cases(rank: int, world: int, dp: int, cp: int) -> list[tuple[str, str, float]]:
    register_attention(CpGroups(dp, cp))
    rows, results = documents(), []
    for masks in MASKS:
        for number, chosen in enumerate(RECIPES):
            net = DistributedDataParallel(model("equipoise")) if world > 1 else model("equipoise")
            loader = BalancedLoader(
                rows,
                chosen,
                lengths=masks.lengths(),
                max_tokens_per_rank=-(-48 // cp) + 4,
                documents_per_step=12,
                dp=dp,
                cp=cp,
                rank=rank,
                shapes=Shapes(max_docs=12) if number in (1, 4) else None,
                too_long="split" if number == 2 else "error",
                timeout=50,
            )
            held: list[tuple[int, int, int]] = []
            for batch in next(loader.steps()):
                (sum_of_losses(net, batch.to_hf(), batch.labels) * batch.loss_scale()).backward()
                sizes = batch.cu_seqlens.diff().tolist()
                told = zip(batch.documents.tolist(), batch.starts.tolist(), sizes, strict=False)
                held += [(d, a, a + n) for d, a, n in told if d >= 0]
            loader.close()
            everywhere: list = [held]
            if world > 1:
                everywhere = [None] * world
                torch.distributed.all_gather_object(everywhere, held)
            pieces = sorted({piece for pieces in everywhere for piece in pieces})
            _, truth = one_process(rows, pieces, lambda document: masks.take([document]).mask().dense())  # noqa: B023
            made = {name.removeprefix("module."): parameter.grad for name, parameter in net.named_parameters()}
            error = max(float((made[name] - grad).norm() / grad.norm()) for name, grad in truth.items())
            results.append((chosen.name, masks.kind, error))
    return results


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_a_step_under_masks_equals_one_process(ranks, dp: int, cp: int) -> None:
    for results in ranks.run(all_cases, dp * cp, dp, cp, timeout=300):
        for name, kind, error in results:
            assert error < 1e-10, f"{name} under {kind}: gradients are off by {error:.2e}"


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ({"attend": "ring"}, "attend='ring' computes causal attention, and these documents have prefix_lm masks"),
        ({"attend": "ulysses"}, "use attend='groupcast' or 'tap' or 'blocks', or 'none'"),
        ({"pack": "concat", "attend": "groupcast"}, "cuts documents as causal ones"),
    ],
)
def test_masks_are_never_taken_for_causal(mix: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BalancedLoader(
            documents(),
            recipe("static", **mix),
            lengths=MASKS[2].lengths(),
            dp=1,
            max_tokens_per_rank=64,
            documents_per_step=4,
        )


def test_a_state_of_other_masks_is_refused() -> None:
    loaders = [
        BalancedLoader(documents(), recipe("magi"), lengths=masks, dp=1, max_tokens_per_rank=64, documents_per_step=4)
        for masks in (MASKS[2].lengths(), MaskColumns("prefix_lm", {"lengths": TOKENS, "prefix": 0}).lengths())
    ]
    with pytest.raises(ValueError, match="masks"):
        loaders[1].load_state_dict(loaders[0].state_dict())
