"""What happens in the stages of a plan, forward and backward: the heart of the one executor.

In stage i: wait for its rows, send off those of stage i+1, compute the tiles of stage i while they travel, and put what
comes home from stage i-1 where it belongs before that of stage i is sent off. Outputs of moved queries come home in
forward, gradients of what moved in backward, which walks the same stages with the final (out, lse).
"""

# T query rows at home, S key rows of a buffer, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .groups import Group
from .kernels.contract import Kernel, Scores
from .program import Cargo, Program
from .queries import looked_at, onward
from .sinks import with_sinks
from .totals import Outputs, Sums, exchange
from .transport import Freight, Journey, Parts, Travelling


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStage:
    tiles: list[tuple[int, int, Any]]
    """(buffer of the queries, buffer of the keys, kernel handle)."""
    moves: Freight | None
    returns: Freight | None
    q_moves: Freight | None
    q_returns: Freight | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A plan made ready for one rank, device and backend; shared by all layers."""

    stages: list[RunStage]
    kernel: Kernel
    buffer_rows: list[int]
    """Of keys."""
    q_rows: list[int]
    """Of queries."""
    read_until: dict[int, int]
    """The last stage during which a received buffer of keys is read or sent on."""
    q_read_until: dict[int, int]

    @property
    def moves_queries(self) -> bool:
        return any(stage.q_moves is not None for stage in self.stages)

    def journey(self, home: Parts, group: Group | None, kept: dict[int, Tensor] | None = None) -> Journey:
        """That of keys and values."""
        return Journey([stage.moves for stage in self.stages], self.read_until, home, group, kept)

    def queries(self, home: Parts, group: Group | None) -> Journey:
        """That of queries."""
        return Journey([stage.q_moves for stage in self.stages], self.q_read_until, home, group)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What was received in forward and is read again in backward, by buffer."""

    kv: dict[int, Tensor] = field(default_factory=dict)
    q: dict[int, Tensor] = field(default_factory=dict)


def prepare(program: Program, kernel: Kernel, device: torch.device) -> Run:
    """What one rank does, with its index tensors and kernel handles on the device."""
    rows, q_rows, stages = program.buffer_rows, program.q_rows, program.stages
    returns = Freight.homeward([stage.returns for stage in stages], device)
    q_returns = Freight.homeward([stage.q_returns for stage in stages], device)
    return Run(
        stages=[
            RunStage(
                tiles=[(q, b, kernel.prepare(tiles, q_rows[q], rows[b], device)) for q, b, tiles in stage.tiles],
                moves=Freight.of(stage.moves, device),
                returns=back,
                q_moves=Freight.of(stage.q_moves, device),
                q_returns=q_back,
            )
            for stage, back, q_back in zip(stages, returns, q_returns, strict=True)
        ],
        kernel=kernel,
        buffer_rows=rows,
        q_rows=q_rows,
        read_until=_read_until([s.moves for s in stages], [[b for _, b, _ in s.tiles] for s in stages]),
        q_read_until=_read_until([s.q_moves for s in stages], [[q for q, _, _ in s.tiles] for s in stages]),
    )


def _read_until(moves: list[Cargo | None], read: list[list[int]]) -> dict[int, int]:
    until: dict[int, int] = {}
    for s, (move, buffers) in enumerate(zip(moves, read, strict=True)):
        # What arrives in stage s leaves its sender during stage s-1.
        sent_on = [(buffer, s - 1) for buffer, _ in move.picks] if move else []
        for buffer, at in [*sent_on, *((buffer, s) for buffer in buffers)]:
            until[buffer] = max(at, until.get(buffer, 0))
    return until


def run_forward(
    run: Run,
    journey: Journey,
    q: Tensor,
    scores: Scores,
    kept: Kept | None,
    sinks: Tensor | None = None,
    queries: Journey | None = None,
) -> tuple[Tensor, Tensor]:
    """→ out [T, H, V] in q's dtype, lse [H, T]. Fills `kept` with the received buffers that tiles read.

    sinks: [H], or of each row, [T, H]. queries: the journey of (q,), if it has begun.
    """
    queries = run.queries((q,), journey.group) if queries is None else queries
    outputs, coming = Outputs(q, run.q_rows, journey.home[1].shape[2]), None
    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        queries.arrive(s)
        for q_buffer, buffer, handle in stage.tiles:
            (q_b,), (k_b, v_b) = queries.of(q_buffer), journey.of(buffer)
            part, lse = run.kernel.forward(handle, q_b, k_b, v_b, scores)
            outputs.put(q_buffer, handle.q_rows, (part, lse.transpose(0, 1)))
            if kept is not None and buffer > 0:
                kept.kv[buffer] = journey.received[buffer]
            if kept is not None and q_buffer > 0:
                kept.q[q_buffer] = q_b
        coming = exchange(outputs, coming, stage.q_returns, queries.group)
    exchange(outputs, coming, None, queries.group)
    out, lse_TH = outputs.of(0)
    if sinks is not None:
        out, lse_TH = with_sinks(out, lse_TH, sinks)
    return out.to(q.dtype), lse_TH.transpose(0, 1)


def queries_back(
    run: Run, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, group: Group | None, kept: bool
) -> Journey:
    """The journey of queries in backward. kept: q was kept where it went."""
    return run.queries(onward(dout, q, out, lse, kept) if run.moves_queries else (), group)


def run_backward(
    run: Run,
    journey: Journey,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    queries: Journey | None = None,
    kept_q: dict[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ dq, dk, dv of the rows at home, in the dtype they were summed in.

    queries: the journey that `queries_back` gives, if it has begun. kept_q: q of received buffers, if kept.
    """
    group, home = journey.group, (dout, q, out, lse)
    queries = queries_back(run, *home, group, kept_q is not None) if queries is None else queries
    kv_sums, q_sums = Sums(journey.home, run.buffer_rows), Sums((q,), run.q_rows)
    coming: Travelling | None = None
    q_coming: Travelling | None = None
    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        queries.arrive(s)
        for q_buffer, buffer, handle in stage.tiles:
            looks = home if q_buffer == 0 else looked_at(queries, q_buffer, kept_q, lse.dtype)
            dout_b, q_b, out_b, lse_b = looks
            k_b, v_b = journey.of(buffer)
            dq, dk, dv = run.kernel.backward(handle, dout_b, q_b, k_b, v_b, out_b, lse_b, scores)
            q_sums.put(q_buffer, handle.q_rows, (dq,))
            kv_sums.put(buffer, handle.k_rows, (dk, dv))
        coming = exchange(kv_sums, coming, stage.returns, group)
        q_coming = exchange(q_sums, q_coming, stage.q_returns, queries.group)
    exchange(kv_sums, coming, None, group)
    exchange(q_sums, q_coming, None, queries.group)
    (dq,), (dk, dv) = q_sums.of(0), kv_sums.of(0)
    return dq, dk, dv
