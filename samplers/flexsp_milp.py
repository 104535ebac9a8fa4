"""FlexSP's mixed-integer programme (ASPLOS'25, section 4.1) for the groups of one slot, by SCIP or HiGHS.

Virtual groups g of degree d_g, as many of each degree as there are ranks for; A[b, g] sequences of bucket b
(``bucketing.py``) in group g, m[g] whether it is used:

    min t   Σ_g A[b, g] = size of b         Σ_b longest_b·A[b, g] <= cap·d_g·m[g]
            Σ_b time(b, d_g)·A[b, g] <= t   Σ_g d_g·m[g] <= ranks         m[g] >= m[g + 1] for groups of one degree

It starts from the groups of the greedy and returns them where it finds nothing better in time: a bucket counts as its
longest sequence throughout, so the programme is a little pessimistic. The authors demand that all ranks are used;
here ranks may be left over. Both backends run on one thread; with `nodes` instead of a clock they are deterministic.

Cost: seconds. 20 sequences on 32 ranks are often solved to the optimum, 512 on 64 seldom improved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..packing.cost import Float64
from ..packing.packs import Int64
from .bucketing import enough_buckets
from .rank_groups import GroupRules, Groups

if TYPE_CHECKING:
    from .flexsp import FlexSp

MILLISECOND = 1e6
"""Programmes are stated in milliseconds of the cost units' nanoseconds: solvers like numbers near one."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Minimise x[0] over low <= rows·x <= high, 0 <= x <= most, all but x[0] integers. Rows in sparse triplets."""

    most: Float64
    row: Int64
    column: Int64
    value: Float64
    low: Float64
    high: Float64
    start: Float64


def milp_groups(work: Int64, tokens: Int64, rules: GroupRules, start: Groups, options: FlexSp) -> Groups:
    """Groups of at most start's makespan for the sequences of a slot (work, tokens: int64[n]).

    Raises ImportError where the solver of `options` is not installed.
    """
    solve = {"scip": solve_scip, "highs": solve_highs}[options.solver]
    capacity = rules.num_ranks * rules.cap
    longest, bucket = enough_buckets(tokens, options.buckets, capacity)
    degree = np.concatenate([np.full(min(rules.num_ranks // c, len(tokens)), c) for c in rules.sizes])
    x = solve(_program(work, longest, bucket, degree, rules, start), options.seconds, options.nodes)
    if x is None:
        return start
    counts = np.rint(x[1 : 1 + len(longest) * len(degree)]).astype(np.int64).reshape(len(longest), len(degree))
    group = np.empty(len(tokens), np.int64)
    for b, row in enumerate(counts):
        group[np.flatnonzero(bucket == b)] = np.repeat(np.arange(len(degree)), row)
    found = _measured(group, degree, work, tokens, rules)
    return found if found.makespan < start.makespan else start


def solve_highs(program: Program, seconds: float, nodes: int = 0) -> Float64 | None:
    """The best x that HiGHS finds in time, None for none. nodes: a limit on its tree, 0 for none."""
    try:
        import highspy
    except ImportError as missing:
        raise ImportError('solver="highs" needs highspy: pip install "equipoise[solvers]"') from missing
    columns, rows = len(program.most), len(program.low)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = np.eye(1, columns)[0]
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), program.most
    lp.row_lower_, lp.row_upper_ = program.low, program.high
    by_row = np.argsort(program.row, kind="stable")
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.searchsorted(program.row[by_row], np.arange(rows + 1)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = program.column[by_row].astype(np.int32), program.value[by_row]
    whole = highspy.HighsVarType.kInteger
    lp.integrality_ = [highspy.HighsVarType.kContinuous] + [whole] * (columns - 1)
    highs = highspy.Highs()
    limits = {
        "output_flag": False,
        "threads": 1,
        "time_limit": seconds,
        "mip_max_nodes": nodes or 2**31 - 1,
    }
    for name, value in limits.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    first = highspy.HighsSolution()
    first.col_value = program.start.tolist()
    highs.setSolution(first)
    highs.run()
    solution = np.array(highs.getSolution().col_value)
    return solution if len(solution) == columns and _holds(program, solution) else None


def solve_scip(program: Program, seconds: float, nodes: int = 0) -> Float64 | None:
    """The best x that SCIP finds in time, None for none. nodes: a limit on its tree, 0 for none."""
    try:
        import pyscipopt
    except ImportError as missing:
        raise ImportError('solver="scip" needs pyscipopt: pip install "equipoise[solvers]"') from missing
    scip = pyscipopt.Model()
    scip.hideOutput()
    scip.setParam("limits/time", seconds)
    scip.setParam("limits/nodes", nodes or -1)
    x = [
        scip.addVar(vtype="C" if i == 0 else "I", lb=0, ub=None if np.isinf(most) else most, obj=1.0 if i == 0 else 0.0)
        for i, most in enumerate(program.most)
    ]
    terms: list[list[Any]] = [[] for _ in program.low]
    for row, column, value in zip(program.row, program.column, program.value, strict=True):
        terms[row].append(float(value) * x[column])
    for row, (low, high) in enumerate(zip(program.low, program.high, strict=True)):
        total = pyscipopt.quicksum(terms[row])
        scip.addCons(total == high if low == high else total <= high)
    first = scip.createSol()
    for variable, value in zip(x, program.start, strict=True):
        scip.setSolVal(first, variable, float(value))
    scip.addSol(first)
    scip.optimizeNogil()
    if scip.getNSols() == 0:
        return None
    best = scip.getBestSol()
    solution = np.array([scip.getSolVal(best, variable) for variable in x])
    return solution if _holds(program, solution) else None


def _program(work: Int64, longest: Int64, bucket: Int64, degree: Int64, rules: GroupRules, start: Groups) -> Program:
    """The programme of the module docstring; x is (t, A row by row, m)."""
    b, g = len(longest), len(degree)
    size = np.bincount(bucket, minlength=b)
    dearest = np.zeros(b, np.int64)
    np.maximum.at(dearest, bucket, work)
    a = 1 + np.arange(b * g).reshape(b, g)
    used = 1 + b * g + np.arange(g)
    time = (dearest[:, None] + rules.token_units[degree] * longest[:, None]) / degree / MILLISECOND
    most = np.concatenate(
        [[np.inf], np.minimum(size[:, None], degree * rules.cap // longest[:, None]).ravel(), np.ones(g)]
    )
    same = np.flatnonzero(degree[1:] == degree[:-1])
    across, down, each = np.repeat(np.arange(b), g), np.tile(np.arange(g), b), np.arange(g)
    blocks: list[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]] = [
        (across, a.ravel(), np.ones(b * g)),
        (b + down, a.ravel(), np.repeat(longest, g)),
        (b + each, used, -rules.cap * degree),
        (b + g + down, a.ravel(), time.ravel()),
        (b + g + each, np.zeros(g, np.int64), -np.ones(g)),
        (np.full(g, b + 2 * g), used, degree),
        (b + 2 * g + 1 + np.arange(len(same)), used[same + 1], np.ones(len(same))),
        (b + 2 * g + 1 + np.arange(len(same)), used[same], -np.ones(len(same))),
    ]
    row, column, value = (np.concatenate([np.asarray(block[k]) for block in blocks]) for k in range(3))
    high = np.concatenate([size, np.zeros(2 * g), [rules.num_ranks], np.zeros(len(same))]).astype(np.float64)
    return Program(
        most=most,
        row=row,
        column=column,
        value=value.astype(np.float64),
        low=np.concatenate([size, np.full(len(high) - b, -np.inf)]),
        high=high,
        start=_start(start, bucket, degree, time),
    )


def _start(start: Groups, bucket: Int64, degree: Int64, time: Float64) -> Float64:
    """x of the greedy's groups: the k-th group of a degree is the k-th virtual one."""
    seat = np.empty(len(start.size), np.int64)
    for c in np.unique(start.size):
        mine = np.flatnonzero(start.size == c)
        seat[mine] = np.flatnonzero(degree == c)[: len(mine)]
    counts = np.zeros(time.shape)
    np.add.at(counts, (bucket, seat[start.group]), 1)
    used = np.zeros(len(degree))
    used[seat] = 1
    return np.concatenate([[(counts * time).sum(0).max()], counts.ravel(), used])


def _holds(program: Program, x: Float64) -> bool:
    """Whether x, rounded, keeps all rows but those of time: solvers have tolerances, plans have none."""
    rounded = np.concatenate([x[:1], np.rint(x[1:])])
    rows = np.zeros(len(program.low))
    np.add.at(rows, program.row, program.value * rounded[program.column])
    timed = np.zeros(len(rows), bool)
    timed[program.row[program.column == 0]] = True
    return bool(np.all(((rows <= program.high) & (rows >= program.low)) | timed))


def _measured(group: Int64, degree: Int64, work: Int64, tokens: Int64, rules: GroupRules) -> Groups:
    """Groups with their true time, the unused left out."""
    load, held = np.zeros((2, len(degree)), np.int64)
    np.add.at(load, group, work)
    np.add.at(held, group, tokens)
    used = np.unique(group)
    seconds = -(-(load + rules.token_units[degree] * held) // degree)
    rows = int((tokens * (degree[group] - 1)).sum())
    return Groups(np.searchsorted(used, group).astype(np.int64), degree[used], int(seconds.max()), rows)
