"""WLB-LLM's outlier queues (OSDI'25, section 4.2): which documents enter a step, and which wait for company.

One long document among short ones costs more than any pack the others can fill, so it is held back until more like it
have come. The paper lets num_packs of them out when as many have queued, without a maximum delay (a seventh of all
tokens never left four queues on one trace) and without an end; a maximum bolted on undoes the balance. The adaptive
release here, in each step:

- takes the outliers (`thresholds[0]` tokens or more) by cost: a run of them that ends at cost c may go if the tokens fit
  and the work of the step, all shorter documents included, is at least num_packs·c; of all such runs the one with the
  most age·tokens goes;
- from half of `max_delay` on, an outlier lets no run go without it, so that its company is saved up;
- at `max_delay` it goes, with the run that makes the step least uneven.

Held documents are all the state there is: `release` is a pure function of them and of the step's new ones. It costs some
100 µs for 500 documents, since it packs them to prove that they fit; `wlb.wlb_balanced` packs them the same way.
With twice the memory and a delay of at most 16 steps, max/mean is 1.001–1.010 on four traces (1.06–1.9 without
queues) at a mean delay of 0.2–0.5 steps.

    >>> import numpy as np
    >>> tokens = np.array([8, 4, 4, 2, 2])
    >>> options = WlbQueues(thresholds=(8,), max_delay=4)
    >>> release(tokens, tokens**2, np.zeros(5), num_packs=2, capacity=16, options=options)     # 64 of 104: it waits
    array([False,  True,  True,  True,  True])
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numba import njit

from .assign import same_length
from .packs import Int64
from .wlb import bins_with_room, wlb_balanced

RELEASE = ("adaptive", "paper")


@dataclass(frozen=True, kw_only=True)
class WlbQueues:
    """When outliers are let go."""

    thresholds: tuple[int, ...] = ()
    """Tokens from which a document is an outlier, rising; `paper` has a queue per threshold, `adaptive` uses the first.
    Empty: a sixteenth of the capacity."""
    max_delay: int = 16
    """Steps that no document waits longer than."""
    release: str = "adaptive"
    """`adaptive`, or `paper`: the oldest num_packs of a queue go once it holds as many (Algorithm 1)."""
    fill: float = 0.9
    """Share of num_packs x capacity that outliers may fill a step to."""

    def __post_init__(self) -> None:
        if self.release not in RELEASE:
            raise ValueError(f"release must be one of {', '.join(RELEASE)}; got {self.release!r}.")
        if list(self.thresholds) != sorted(set(self.thresholds)) or min(self.thresholds, default=1) < 1:
            raise ValueError(f"thresholds must be tokens >= 1 that rise; got {self.thresholds}.")
        if self.max_delay < 0 or not 0 < self.fill <= 1:
            raise ValueError(
                f"max_delay must be at least 0 steps and fill in (0, 1]; got {self.max_delay} and {self.fill}."
            )


def release(
    tokens: npt.ArrayLike,
    cost: npt.ArrayLike,
    age: npt.ArrayLike,
    num_packs: int,
    capacity: int,
    options: WlbQueues,
    flush: bool = False,
) -> npt.NDArray[np.bool_]:
    """Which of n documents enter this step, bool[n]; `wlb_balanced` packs those without leaving one over.

    The n are all that were held back so far and the step's new ones: tokens int[n] <= capacity, cost int[n], age int[n]
    in steps, 0 for the new. What does not fit stays back, the youngest first. No document ages beyond `max_delay` as
    long as those of that age fit, and a step gets at least num_packs documents where there are as many. flush (the
    epoch ends): all go that fit; call again with what is left.
    """
    cost, tokens = same_length(cost, tokens)
    age = np.asarray(age, dtype=np.int64)
    if age.shape != tokens.shape or (len(tokens) and (age.min() < 0 or tokens.max() > capacity)):
        raise ValueError(
            f"Every document has an age >= 0 and at most {capacity} tokens; got ages of shape {age.shape} for "
            f"{len(tokens)} documents of up to {max(tokens, default=0)} tokens."
        )
    if num_packs < 1:
        raise ValueError(f"release needs at least one pack; got num_packs={num_packs}.")
    chosen = age >= options.max_delay
    if flush:
        chosen[:] = True
    else:
        thresholds = options.thresholds or (max(int(capacity) // 16, 1),)
        chosen |= tokens < thresholds[0]
        held = np.flatnonzero(tokens >= thresholds[0])
        if options.release == "paper":
            chosen[_popped(tokens, age, thresholds, num_packs)] = True
        elif len(held):
            held = held[np.lexsort((-age[held], cost[held]))]
            room = max(int(options.fill * num_packs * capacity), min(num_packs * capacity, int(tokens[age == 0].sum())))
            short = tokens < thresholds[0]
            chosen[held] = _runs(
                *(tokens[held], cost[held], age[held]),
                *(num_packs, room - tokens[short].sum(), cost[short].sum(), options.max_delay),
            )
        missing = num_packs - int(chosen.sum())
        if missing > 0:
            waiting = np.flatnonzero(~chosen)
            chosen[waiting[np.argsort(cost[waiting], kind="stable")[:missing]]] = True
    return _oldest_that_fit(tokens, cost, age, chosen, num_packs, capacity)


def replay(
    tokens: npt.ArrayLike,
    cost: npt.ArrayLike,
    edges: npt.ArrayLike,
    num_packs: int,
    capacity: int,
    options: WlbQueues,
) -> tuple[npt.NDArray[np.float64], Int64]:
    """(imbalance float64[s], delay int64[n] in steps) of an epoch of n documents; step t admits edges[t] … edges[t + 1].

    Imbalance is the costliest pack over the mean. The epoch ends with as many more steps as the queues take to empty;
    imbalance counts them too.
    """
    cost, tokens = same_length(cost, tokens)
    edges = np.asarray(edges, dtype=np.int64)
    delay, born = np.zeros(len(tokens), np.int64), np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    held, imbalance, step = np.zeros(0, np.int64), [], 0
    while step < len(edges) - 1 or len(held):
        flush = step >= len(edges) - 1
        if not flush:
            held = np.concatenate([held, np.arange(edges[step], edges[step + 1])])
        goes = release(tokens[held], cost[held], step - born[held], num_packs, capacity, options, flush)
        now, held = held[goes], held[~goes]
        delay[now] = step - born[now]
        order, offsets, _ = wlb_balanced(tokens[now], cost[now], num_packs, capacity)
        work = np.diff(np.concatenate([[0], np.cumsum(cost[now][order])])[offsets])
        imbalance.append(work.max() * num_packs / max(int(work.sum()), 1))
        step += 1
    return np.array(imbalance), delay


def tune(
    tokens: npt.ArrayLike,
    cost: npt.ArrayLike,
    num_packs: int,
    capacity: int,
    *,
    tokens_per_step: int | None = None,
    options: WlbQueues | None = None,
    price_of_delay: float = 0.01,
) -> WlbQueues:
    """`options` with the thresholds that did best on a sample of documents (tokens, cost: int[n]) in their order.

    Best is the least mean imbalance + price_of_delay x mean delay of a token, in steps. tokens_per_step: half of
    num_packs x capacity by default. Tried are 1/64 … 1/4 of the capacity, for `paper` in up to three queues.
    """
    cost, tokens = same_length(cost, tokens)
    options = options or WlbQueues()
    size = tokens_per_step or num_packs * capacity // 2
    ends = np.cumsum(tokens) // max(size, 1)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(ends)) + 1, [len(tokens)]])
    levels = [max(int(capacity) // part, 1) for part in (64, 32, 16, 8, 4)]
    queues: list[tuple[int, ...]] = [(level,) for level in levels]
    if options.release == "paper":
        queues += [(a, b) for a in levels for b in levels if a < b] + [(levels[2], levels[3], levels[4])]
    best, least = options, np.inf
    for thresholds in sorted(set(queues)):
        tried = replace(options, thresholds=thresholds)
        imbalance, delay = replay(tokens, cost, edges, num_packs, capacity, tried)
        score = imbalance.mean() + price_of_delay * float((delay * tokens).sum() / max(int(tokens.sum()), 1))
        if score < least:
            best, least = tried, score
    return best


def _popped(tokens: Int64, age: Int64, thresholds: tuple[int, ...], num_packs: int) -> Int64:
    """The documents that the paper's queues let go: of each that holds num_packs, the oldest num_packs."""
    queue = np.searchsorted(np.array(thresholds), tokens, side="right")
    popped = [np.zeros(0, np.int64)]
    for level in range(1, len(thresholds) + 1):
        waiting = np.flatnonzero(queue == level)
        if len(waiting) >= num_packs:
            popped.append(waiting[np.argsort(-age[waiting], kind="stable")[:num_packs]])
    return np.concatenate(popped)


def _oldest_that_fit(
    tokens: Int64, cost: Int64, age: Int64, chosen: npt.NDArray[np.bool_], num_packs: int, capacity: int
) -> npt.NDArray[np.bool_]:
    """`chosen`, or as many of them, the oldest and of equal age the costliest first, as can be packed together."""

    def fits(some: Int64) -> bool:
        return bool((bins_with_room(tokens[some], cost[some], num_packs, capacity) >= 0).all())

    if fits(np.flatnonzero(chosen)):
        return chosen
    by_age = np.flatnonzero(chosen)
    by_age = by_age[np.lexsort((-cost[by_age], -age[by_age]))]
    low, high = 0, len(by_age)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(np.sort(by_age[:middle])) else (low, middle)
    fitting = np.zeros_like(chosen)
    fitting[by_age[:low]] = True
    return fitting


@njit(nogil=True, cache=True)
def _runs(tokens, cost, age, num_packs, room, work, max_delay):
    """Adaptive release of outliers in order of cost; `work` and `room` are what the shorter documents make and leave."""
    n = len(tokens)
    goes = age >= max_delay
    saving = max_delay - max_delay // 2
    must = 0  # a run ends no sooner: at the last outlier that is late, or that others have to wait for
    for i in range(n):
        if goes[i]:
            must = i + 1
    late = must > 0
    if not late:
        for i in range(n):
            if age[i] >= saving and max_delay > 0:
                must = i + 1
    first = last = lo = 0
    most, worst = np.int64(-1), np.inf
    sum_tokens, sum_cost, value = np.int64(0), np.int64(work), np.int64(0)
    fair = False
    for hi in range(1, n + 1):
        sum_tokens += tokens[hi - 1]
        sum_cost += cost[hi - 1]
        value += (age[hi - 1] + 1) * tokens[hi - 1]
        while sum_tokens > room and lo < hi:
            sum_tokens -= tokens[lo]
            sum_cost -= cost[lo]
            value -= (age[lo] + 1) * tokens[lo]
            lo += 1
        if hi < must or lo == hi:
            continue
        if sum_cost // num_packs >= cost[hi - 1]:
            if value > most:
                fair, most, first, last = True, value, lo, hi
        elif late and not fair and cost[hi - 1] / sum_cost < worst:
            worst, first, last = cost[hi - 1] / sum_cost, lo, hi
    goes[first:last] = True
    taken = tokens[goes].sum()
    for i in range(first, last):  # late ones below the run take the place of its cheapest
        if taken > room and age[i] < max_delay:
            goes[i] = False
            taken -= tokens[i]
    for i in range(last - 1, -1, -1):
        if not goes[i] and taken + tokens[i] <= room:
            goes[i] = True
            taken += tokens[i]
    return goes
