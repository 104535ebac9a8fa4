"""Unmodified Hugging Face models under a plan: nothing leaks between documents, gradients are exact, misuse is refused."""

from __future__ import annotations

import pytest
import torch
from equipoise.attention.groups import CpGroups
from equipoise.attention.hf import register_attention
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import zigzag

from tests.attention.oracle import LAYOUTS, Case

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 1, 20, 3, 12)
GROUPS: dict[int, CpGroups] = {}


def model_of(shape: str, groups: CpGroups, **options) -> torch.nn.Module:
    register_attention(groups)
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[shape](
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="equipoise",
        **options,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS])


def groups_of(cp: int) -> CpGroups:
    if cp not in GROUPS:
        GROUPS[cp] = CpGroups(1, cp)
    return GROUPS[cp]


def logits_of(rank: int, world: int, shape: str, cases: list[Case], packs: list[torch.Tensor]) -> list[list]:
    """This rank's logits of each case and pack of token ids."""
    model = model_of(shape, groups_of(world))
    results = []
    for case in cases:
        held = torch.from_numpy(case.shards(world).positions(rank))
        plan = case.plan(tuple(range(world)), rank)
        with torch.no_grad():
            results.append(
                [
                    model(
                        input_ids=ids[held][None], position_ids=positions()[held][None], plan=plan, use_cache=False
                    ).logits[0]
                    for ids in packs
                ]
            )
    return results


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_no_document_sees_another(ranks, shape, world):
    """Changing one token of a document changes logits of that document, from that token on, and no bit of any other."""
    changed = tokens()
    place = 8 + 6
    changed[place] = (changed[place] + 1) % 50
    cases = [Case(lengths=LENGTHS, layout=layout) for layout in LAYOUTS]
    cases += [Case(lengths=LENGTHS, kind=kind) for kind in ("direct", "gather", "ulysses")]
    for_rank = ranks.run(logits_of, world, shape, cases, [tokens(), changed])
    touched = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    touched[place : 8 + 20] = True
    for i, case in enumerate(cases):
        for rank in range(world):
            before, after = for_rank[rank][i]
            held = torch.from_numpy(case.shards(world).positions(rank))
            differs = (before != after).any(dim=1)
            assert torch.equal(differs, touched[held]), (case, rank)


def gradients(rank: int, world: int, shape: str, case: Case, checkpointing: bool) -> dict[str, torch.Tensor]:
    """Gradients of the summed token losses, summed over ranks."""
    model = model_of(shape, groups_of(world))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    held = torch.from_numpy(case.shards(world).positions(rank))
    plan = case.plan(tuple(range(world)), rank)
    ids, at = tokens()[held][None], positions()[held][None]
    logits = model(input_ids=ids, position_ids=at, plan=plan, use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits, next_tokens()[held], reduction="sum").backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    return {name: p.grad for name, p in model.named_parameters()} if rank == 0 else {}


def next_tokens() -> torch.Tensor:
    """Targets within each document; -100 at its end."""
    labels = [torch.cat([ids[1:], torch.tensor([-100])]) for ids in tokens().split(LENGTHS)]
    return torch.cat(labels)


def one_process(shape: str) -> dict[str, torch.Tensor]:
    model = model_of(shape, CpGroups(1, 1))
    model.set_attn_implementation("sdpa")
    model.train()
    for ids, labels in zip(tokens().split(LENGTHS), next_tokens().split(LENGTHS), strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
@pytest.mark.parametrize("kind,checkpointing", [("ring", False), ("ring", True), ("ulysses", True)])
def test_gradients_are_those_of_the_documents_alone(ranks, shape, kind, checkpointing):
    case = Case(lengths=LENGTHS, kind=kind)
    got, want = ranks.run(gradients, 3, shape, case, checkpointing)[0], one_process(shape)
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() <= 1e-12 * grad.abs().max().clamp_min(1.0), name


def call(**changes):
    """One forward of a tiny model with a valid plan, but for the changes."""
    options = changes.pop("config", {})
    model = model_of("qwen3", CpGroups(1, 1), **options)
    if changes.pop("train", False):
        model.train()
    ids = tokens()[None]
    arguments = {
        "input_ids": ids,
        "position_ids": positions()[None],
        "plan": ring_plan(zigzag(Case(lengths=LENGTHS).cu_seqlens, 1), ranks=(0,)),
        "use_cache": False,
    }
    return model(**{**arguments, **changes})


def test_a_valid_call_passes():
    assert call().logits.shape == (1, sum(LENGTHS), 50)


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"plan": None}, "call model\\(..., plan=...\\)"),
        ({"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64)}, "The plan is the mask"),
        ({"attention_mask": torch.zeros(1, 1, sum(LENGTHS), sum(LENGTHS))}, "The plan is the mask"),
        ({"use_cache": True}, "no KV cache"),
        ({"config": {"attention_dropout": 0.1}, "train": True}, "attention_dropout=0"),
        ({"softcap": 30.0}, "cpu attention kernel does not cap scores; got softcap=30.0"),
        ({"s_aux": torch.zeros(3)}, "one floating score per query head, \\[4\\]"),
        ({"input_ids": tokens()[None].repeat(2, 1), "position_ids": positions()[None].repeat(2, 1)}, "a batch of 2"),
        ({"input_ids": tokens()[None, 1:], "position_ids": positions()[None, 1:]}, "43 tokens"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        call(**changes)


def test_a_filled_cache_is_refused():
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 8, dtype=torch.float64), torch.zeros(1, 2, 5, 8, dtype=torch.float64), 0)
    with pytest.raises(ValueError, match="no KV cache"):
        call(past_key_values=cache)


# ---- Layers that ask for something of their own. ----


class Norm(torch.nn.Module):
    """The RMS norms of transformers compute in fp32: this one in the input's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float, shift: float):
        super().__init__()
        self.weight, self.eps, self.shift = weight, eps, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self.shift)


def in_fp64(model: torch.nn.Module) -> torch.nn.Module:
    """With its norms and softmax in fp64."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
                setattr(module, name, Norm(norm.weight, eps, 1.0 if "Gemma" in type(norm).__name__ else 0.0))
    return model


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
KINDS = {
    # Every layer has a window, or the second only; gpt-oss and Gemma 2 alternate, and have sinks and a cap beside.
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 8},
    "GptOss": {
        "sliding_window": 5,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "head_dim": 4,
        "first_k_dense_replace": 2,
    },
}


def special_model(kind: str, groups: CpGroups, implementation: str) -> torch.nn.Module:
    register_attention(groups, kernel="reference" if kind == "Gemma2" else None)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]}, attn_implementation=implementation)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "sinks" in name or "bias" in name:
                p.normal_(std=0.4)  # so that scores are not all alike
    return in_fp64(model).train()


def special_gradients(rank: int, world: int, kind: str, case: Case) -> tuple[list, dict[str, torch.Tensor]]:
    """This rank's positions and logits, and gradients of the summed token losses, summed over ranks."""
    model = special_model(kind, groups_of(world), "equipoise")
    held = torch.from_numpy(case.shards(world).positions(rank))
    logits = model(
        input_ids=tokens()[held][None],
        position_ids=positions()[held][None],
        plan=case.plan(tuple(range(world)), rank),
        use_cache=False,
    ).logits[0]
    torch.nn.functional.cross_entropy(logits, next_tokens()[held], reduction="sum").backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
    return [held, logits.detach()], grads


def alone(kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of the documents one by one, with the model's own attention."""
    model = special_model(kind, CpGroups(1, 1), "eager")
    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch:
        # Eager attention asks for its softmax in fp32.
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens().split(LENGTHS)]
    for part, labels in zip(logits, next_tokens().split(LENGTHS), strict=True):
        torch.nn.functional.cross_entropy(part, labels, reduction="sum").backward()
    return torch.cat(logits).detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("plan,world", [("ring", 3), ("ulysses", 2)])
def test_what_layers_ask_for_is_exact(ranks, kind, plan, world):
    """Windows, sinks, capped scores and value dims of unmodified models, beside their own attention per document."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers has no {kind}")
    by_rank = ranks.run(special_gradients, world, kind, Case(lengths=LENGTHS, kind=plan))
    want_logits, want = alone(kind)
    for (held, logits), grads in by_rank:
        assert (logits - want_logits[held]).abs().max() <= 1e-12 * want_logits.abs().max()
        assert set(grads) == set(want)
        for name, grad in want.items():
            assert (grads[name] - grad).abs().max() <= 1e-12 * grad.abs().max().clamp_min(1.0), name


@pytest.mark.parametrize("name", ["my_flash", "org/kernel"])
def test_names_of_transformers_are_refused(name):
    with pytest.raises(ValueError, match="kernels of its own"):
        register_attention(CpGroups(1, 1), name)


def test_autocast_mixes_dtypes_before_attention():
    """Qwen3's query and key norms give fp32 beside a bf16 value."""
    model = model_of("qwen3", CpGroups(1, 1)).float()
    plan = ring_plan(zigzag(Case(lengths=LENGTHS).cu_seqlens, 1), ranks=(0,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens()[None], position_ids=positions()[None], plan=plan, use_cache=False).logits
    assert logits.isfinite().all()
