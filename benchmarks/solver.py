"""Least makespan of packing by HiGHS, for `quality.py`."""

from __future__ import annotations

import highspy
import numpy as np


def optimum(tokens: np.ndarray, cost: np.ndarray, num_packs: int, capacity: int, start: int) -> tuple[float, bool]:
    """(least makespan or a lower bound of it, whether it is proven to within 0.1 %); start: a makespan that is possible."""
    unit = cost.sum() / num_packs
    model = highspy.Highs()
    for option, value in (("output_flag", False), ("time_limit", 5.0), ("mip_rel_gap", 1e-3), ("threads", 1)):
        model.setOptionValue(option, value)
    makespan = model.addVariable(lb=max(1.0, cost.max() / unit), ub=start / unit)
    place = [[model.addBinary() for _ in range(num_packs)] for _ in tokens]
    for row in place:
        model.addConstr(sum(row) == 1)
    for pack in range(num_packs):
        inside = [row[pack] for row in place]
        model.addConstr(sum(float(c / unit) * x for c, x in zip(cost, inside, strict=True)) - makespan <= 0)
        model.addConstr(sum(float(t) * x for t, x in zip(tokens, inside, strict=True)) <= capacity)
    model.minimize(makespan)
    info = model.getInfo()
    lower = max(info.mip_dual_bound * unit, float(cost.max()), unit)
    return lower, info.objective_function_value * unit <= 1.002 * lower
