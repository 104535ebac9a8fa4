"""Steps of ChunkFlow through the real loader and unmodified HF models: gradients, losses, memory, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equipoise import BalancedLoader, CpGroups, Shapes, ThdBatch, recipe, register_attention
from equipoise.attention.chunk_batches import group_sizes
from equipoise.attention.chunk_run import run_chunks
from equipoise.attention.kv_store import KvStore, store_bytes
from equipoise.attention.saved_bytes import SavedBytes
from equipoise.packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE, schedule
from equipoise.samplers.solve import ChunkFlow
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.models import in_fp64

transformers = pytest.importorskip("transformers")

VOCAB = 61
LENGTHS = (1, 2, 13, 7, 1, 45, 29, 17, 2, 8, 9)
SHORT = (1, 13, 29, 2, 17, 9)
"""At chunks of 8, the last one is a single token, which on several ranks is filled up."""
GROUPS: dict[tuple[int, int], CpGroups] = {}


def register(dp: int, cp: int) -> None:
    if (dp, cp) not in GROUPS:
        GROUPS[dp, cp] = CpGroups(dp, cp)
    register_attention(GROUPS[dp, cp])


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(5)
    rows = []
    for tokens in lengths:
        ids = draw.integers(0, VOCAB, tokens)
        rows.append({"input_ids": ids, "labels": np.where(draw.random(tokens) < 0.2, -100, ids)})
    return rows


def model_of(shape: str = "qwen3", implementation: str = "equipoise", layers: int = 3, **options) -> torch.nn.Module:
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[shape](
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation=implementation,
        tie_word_embeddings=False,
        **options,
    )
    torch.manual_seed(0)
    return in_fp64(transformers.AutoModelForCausalLM.from_config(config)).train()


def loss_of(output, batch: ThdBatch) -> torch.Tensor:
    """In fp64; HF's own casts logits to fp32."""
    logits = output.logits[0]
    return torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum") * batch.loss_scale()


def loader_of(rows: list[dict], *, chunk_tokens: int = 8, keep: int = 1, cp: int = 1, **options) -> BalancedLoader:
    chosen = recipe("chunkflow", options=ChunkFlow(chunk_tokens=chunk_tokens, keep=keep))
    if cp > 1:
        chosen = recipe("chunkflow", shard="zigzag", attend="ring", options=chosen.options)
    options = {"documents_per_step": len(rows), "rank": 0, "dp": 1, "seed": 3, **options}
    return BalancedLoader(rows, chosen, max_tokens_per_rank=-(-chunk_tokens // cp) + 1, cp=cp, **options)


def batches_of(rows: list[dict], **options) -> list[ThdBatch]:
    loader = loader_of(rows, **options)
    batches = list(next(loader.steps()))
    loader.close()
    return batches


def one_by_one(rows: list[dict], net: torch.nn.Module) -> float:
    """Gradients of the step's documents, one at a time, into `net`; → the loss."""
    shifted = [np.append(row["labels"][1:], -100) for row in rows]
    targets, total = sum(int((labels != -100).sum()) for labels in shifted), 0.0
    for row, labels in zip(rows, shifted, strict=True):
        logits = net(input_ids=torch.from_numpy(row["input_ids"])[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    return total


def furthest(net: torch.nn.Module, reference: torch.nn.Module) -> float:
    want = dict(reference.named_parameters())
    errors = []
    for name, parameter in net.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        truth = want[name.removeprefix("module.")].grad
        errors.append(float((grad - truth).norm() / truth.norm()))
    return max(errors)


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
@pytest.mark.parametrize(("keep", "checkpointing"), [(1, False), (2, False), (3, True), (99, False)])
def test_gradients_are_those_of_whole_documents(shape, keep, checkpointing):
    register(1, 1)
    rows, net, reference = documents(), model_of(shape), model_of(shape, "sdpa")
    if checkpointing:
        net.gradient_checkpointing_enable()
    batches = batches_of(rows, keep=keep)
    assert sum(size > 1 for size in group_sizes(batches)) == 5
    losses = run_chunks(net, batches, keep=keep, loss=loss_of)
    assert abs(float(sum(losses)) - one_by_one(rows, reference)) < 1e-12
    assert furthest(net, reference) < 1e-12


def test_twenty_steps_have_the_loss_curve_of_one_process():
    register(1, 1)
    rows = documents(LENGTHS * 2)
    loader = loader_of(rows, keep=2, documents_per_step=11)
    net, reference = model_of(), model_of(implementation="sdpa")
    fits = [torch.optim.AdamW(x.parameters(), lr=1e-3, foreach=False) for x in (net, reference)]
    curves: list[list[float]] = [[], []]
    for epoch in range(10):
        loader.set_epoch(epoch)
        for step in loader.steps():
            batches = list(step)
            curves[0].append(float(sum(run_chunks(net, batches, keep=2, loss=loss_of))))
            seen = sorted({d for batch in batches for d in batch.documents.tolist() if d >= 0})
            curves[1].append(one_by_one([rows[d] for d in seen], reference))
            for fit in fits:
                fit.step()
                fit.zero_grad()
    loader.close()
    assert len(curves[0]) == 20
    assert curves[0][-1] < curves[0][0]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-10)


def one_step(rank: int, world: int, dp: int, cp: int, wrap: str, keeps: list[int]) -> list[float]:
    """How far gradients of a step on dp x cp ranks are from one process, for each K."""
    register(dp, cp)
    group = dist.new_group(backend="gloo")
    errors = []
    for keep in keeps:
        rows, net = documents(SHORT), model_of()
        sync = "slot" if wrap == "fsdp2" else "step"
        loader = loader_of(rows, keep=keep, dp=dp, cp=cp, rank=rank, sync=sync, group=group, timeout=50)
        operations = loader.sampler.plan(0).operations(rank)
        if wrap == "ddp":
            net = DistributedDataParallel(net)
        else:
            for layer in net.model.layers:
                fully_shard(layer)
            fully_shard(net)
        losses = run_chunks(net, next(loader.steps()), operations=operations, loss=loss_of)
        total = sum(losses).detach() / world
        dist.all_reduce(total)
        reference = model_of(implementation="sdpa")
        truth = one_by_one(rows, reference)
        errors += [abs(float(total) - truth), furthest(net, reference)]
        loader.close()
    return errors


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (1, 3), (2, 2)])
def test_replicas_and_groups_of_ranks_take_the_same_step(ranks, dp, cp, wrap):
    keeps = [1, 2, 99] if dp * cp == 2 else [2]
    for errors in ranks.run(one_step, dp * cp, dp, cp, wrap, keeps, timeout=300):
        assert max(errors) < 1e-12, errors


def saved_and_stored(num_chunks: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most bytes saved by autograd, and most held by the store, in a step of one document of chunks of 16 tokens."""
    net, stored = model_of(), [0]
    batches = batches_of(documents((16 * num_chunks,)), chunk_tokens=16, keep=keep)
    add = KvStore.add

    def counting(store: KvStore, *arguments):
        made = add(store, *arguments)
        stored[0] = max(stored[0], store.nbytes)
        return made

    monkeypatch.setattr(KvStore, "add", counting)
    with SavedBytes(net) as saved:
        run_chunks(net, batches, keep=keep, loss=loss_of)
    monkeypatch.undo()
    assert saved.now == 0
    return saved.most, stored[0]


def test_activations_grow_with_chunks_kept_and_not_with_the_document(monkeypatch):
    register(1, 1)
    config, saved = model_of().config, {}
    for num_chunks in (4, 8, 16):
        for keep in (1, 2):
            saved[num_chunks, keep], stored = saved_and_stored(num_chunks, keep, monkeypatch)
            assert stored == store_bytes(config, 16 * num_chunks, torch.float64)
    assert saved[4, 1] == saved[8, 1] == saved[16, 1] > 0
    assert saved[4, 2] == saved[8, 2] == saved[16, 2]
    assert 1.9 * saved[4, 1] < saved[4, 2] <= 2 * saved[4, 1]
    whole, _ = saved_and_stored(16, 16, monkeypatch)
    assert whole > 15 * saved[16, 1]


def test_the_store_is_bounded():
    register(1, 1)
    rows, net = documents((40, 3, 20, 20)), model_of()
    batches = batches_of(rows)
    needed = store_bytes(net.config, 40, torch.float64)
    run_chunks(net, batches, loss=loss_of, max_store_bytes=needed)
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    with pytest.raises(ValueError, match=f"need {needed} bytes .* max_store_bytes={needed - 1}"):
        run_chunks(net, batches, loss=loss_of, max_store_bytes=needed - 1)
    assert all(torch.equal(p.grad, before) for p, before in zip(net.parameters(), gradients, strict=True))
    # A round of all groups has all stores at once.
    everything = schedule(len(batches), 99)
    both = store_bytes(net.config, 80, torch.float64)
    with pytest.raises(ValueError, match=f"need {both} bytes"):
        run_chunks(net, batches, operations=everything, loss=loss_of, max_store_bytes=needed)


def test_documents_that_are_done_leave_the_store(monkeypatch):
    """Two documents one after another never hold more than the longer one needs."""
    register(1, 1)
    net, batches, stores, most = model_of(), batches_of(documents((40, 24))), [], 0
    init, add = KvStore.__init__, KvStore.add

    def collecting(store: KvStore, rows: int) -> None:
        stores.append(store)
        init(store, rows)

    def counting(store: KvStore, *arguments):
        nonlocal most
        made = add(store, *arguments)
        most = max(most, sum(each.nbytes for each in stores))
        return made

    monkeypatch.setattr(KvStore, "__init__", collecting)
    monkeypatch.setattr(KvStore, "add", counting)
    run_chunks(net, batches, loss=loss_of)
    assert len(stores) == 2
    assert most == store_bytes(net.config, 40, torch.float64)
    assert sum(each.nbytes for each in stores) == 0


def test_the_bound_counts_autocast():
    register(1, 1)
    net, batches = model_of().float(), batches_of(documents((40,)))
    needed = store_bytes(net.config, 40, torch.bfloat16)
    assert needed == 40 * 3 * 2 * 8 * 2 * (2 + 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"need {needed} bytes"):
        run_chunks(net, batches, max_store_bytes=needed - 1)


def test_the_loss_of_the_model_is_the_default():
    register(1, 1)
    rows = documents()
    batches, nets = batches_of(rows, keep=2), [model_of().float() for _ in range(2)]
    losses = run_chunks(nets[0], batches, keep=2)
    given = run_chunks(nets[1], batches, keep=2, loss=loss_of)
    torch.testing.assert_close(torch.stack(losses), torch.stack(given))
    for (name, got), want in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)


def test_packs_that_are_filled_up():
    register(1, 1)
    rows, net, reference = documents(), model_of(), model_of(implementation="sdpa")
    run_chunks(net, batches_of(rows, shapes=Shapes(pad_to=9)), keep=2, loss=loss_of)
    one_by_one(rows, reference)
    assert furthest(net, reference) < 1e-12


def test_documents_whose_labels_are_all_masked_still_hand_gradients_on():
    """The last chunk has a loss, the first has none and receives what the last owes it."""
    register(1, 1)
    rows, net, reference = documents((24,)), model_of(), model_of(implementation="sdpa")
    rows[0]["labels"][:20] = -100
    run_chunks(net, batches_of(rows), loss=loss_of)
    one_by_one(rows, reference)
    assert furthest(net, reference) < 1e-12


def ascending(sizes: list[int]) -> np.ndarray:
    """The paper's Algorithm 2 as printed, of one group with K = 1."""
    (n,) = sizes
    back = [(BACKWARD, n - 1), *(step for i in range(n - 1) for step in ((RECOMPUTE, i), (BACKWARD, i)))]
    return np.array([*((FORWARD, i) for i in range(n)), *back])


@pytest.mark.parametrize(
    "operations",
    [
        ascending([3]),
        schedule(2, 1),
        schedule(4, 1),
        schedule([1, 2], 1),
        schedule(3, 1)[:-1],
        schedule(3, 3)[[1, 0, 2, 3, 4, 5]],
        np.append(schedule(3, 3), [[RECOMPUTE, 0]], axis=0),
        np.append(schedule(3, 3), [[7, 0]], axis=0),
        np.zeros((0, 2)),
    ],
)
def test_operations_that_lose_gradients_are_refused(operations):
    register(1, 1)
    with pytest.raises(ValueError, match="Operations run each of the 3 micro-batches"):
        run_chunks(model_of(), batches_of(documents((24,))), operations=operations)


def test_chunks_that_are_missing_or_astray_are_refused():
    register(1, 1)
    net, batches = model_of(), batches_of(documents((24, 17)))
    for wrong in (batches[1:], batches[:2] + batches[3:], batches[::-1], batches[:4]):
        with pytest.raises(ValueError, match="chunks of a document run on one rank one after another"):
            run_chunks(net, wrong)
    astray = batches[1].replace(starts=batches[1].starts + 1)
    with pytest.raises(ValueError, match="begins where the one before ends, at token 8"):
        run_chunks(net, [batches[0], astray, *batches[2:]])
    with pytest.raises(ValueError, match="at least one micro-batch"):
        run_chunks(net, [])


def test_what_cannot_be_run_twice_or_on_these_ranks_is_refused():
    register(1, 1)
    batches = batches_of(documents((24,)))
    with pytest.raises(ValueError, match="there can be no dropout; got drop=0.1"):
        net = model_of()
        net.drop = torch.nn.Dropout(0.1)
        run_chunks(net, batches)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        run_chunks(model_of(attention_dropout=0.1), batches)
    with pytest.raises(ValueError, match="keeps at least one"):
        run_chunks(model_of(), batches, keep=0)
    with pytest.raises(ValueError, match="on 2 ranks needs a plan"):
        run_chunks(model_of(), [batch.replace(cp_size=2) for batch in batches])
    with pytest.raises(ValueError, match="got a SimpleNamespace"):
        run_chunks(model_of(), [batch.replace(plan=SimpleNamespace()) for batch in batches])
