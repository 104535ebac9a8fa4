"""Resume: what the state of a run is, and what another configuration may make of it.

The state is global (the same on every rank), small and plain JSON: where the next micro-batch stands (epoch, step, slot), the
place in the stream where that step begins, what queues hold back, and the configuration that planned it. It counts documents,
not packs, so that a run may go on with other ranks, caps or recipes:

- what decides *which* documents come in *which* order must be as it was, or the state is refused (``configuration.py``);
- what decides how a step is packed and placed may change, with a warning. Steps of the same size then hold the same
  documents; with another size every remaining document still comes exactly once;
- a step that is under way (``slot`` > 0) is planned again as it was, and what is left of it becomes a step of its own
  (``rest``), which keeps the number of targets of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..packing.lengths import Lengths
from ..packing.packs import Spans
from ..packing.queues import WlbQueues
from .admission import Admission, Window
from .admission_choice import items_of
from .carry import Held, QueuedAdmission
from .configuration import SIZES, UNDER_WAY, told
from .groups import GroupedItems
from .items import Items
from .order import key_of
from .stream_items import StreamItems
from .unindexed import Unindexed

if TYPE_CHECKING:
    from .batch_sampler import BalancedBatchSampler

STATE_VERSION = 2
STATE_KEYS = frozenset(
    ("version", "config", "epoch", "step", "slot", "num_targets", "position", "epoch_start", "refitted", "held", "rest")
)
_SPANS = ("document", "start", "stop", "pairs")


def check_state(state: object) -> None:
    """Raises ValueError unless this is a whole state of this version."""
    keys = set(state) if isinstance(state, dict) else set()
    if not isinstance(state, dict) or not keys >= STATE_KEYS or state["version"] != STATE_VERSION:
        version = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"a state of version {STATE_VERSION} is needed; this one has version {version!r} and lacks "
            f"{', '.join(sorted(STATE_KEYS - keys)) or 'nothing'}"
        )
    for name, is_sound in SOUND.items():
        try:
            right = is_sound(state[name])
        except (TypeError, KeyError, AttributeError):
            right = False
        if not right:
            raise ValueError(f"the state was changed since it was saved: {name} is {state[name]!r}; take an older one")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_columns(value: Any) -> bool:
    """Lists of whole numbers, as many in each."""
    return len(set(map(len, value))) == 1 and all(map(_is_count, chain(*value)))


def _is_position(value: Any) -> bool:
    """A place in the order of an index, or of a stream."""
    if not isinstance(value, dict):
        return _is_count(value)
    numbers = [value[name] for name in ("epoch", "round", "part", "number")]
    pairs = [value["edge"], *value["ends"], *value["held"]]
    return all(map(_is_count, chain(numbers, value["counts"].values(), *pairs))) and set(map(len, pairs)) == {2}


SOUND: dict[str, Callable[[Any], bool]] = {
    "config": lambda value: isinstance(value, dict),
    "epoch": _is_count,
    "step": _is_count,
    "slot": _is_count,
    "num_targets": lambda value: value is None or _is_count(value),
    "position": _is_position,
    "epoch_start": _is_position,
    "refitted": lambda value: value is None or [type(each) for each in value] == [float, float],
    "held": lambda value: value is None or (_are_columns(value[:2]) and all(map(_is_count, value[2:]))),
    "rest": lambda value: value is None or (len(value) == 1 + len(_SPANS) and _are_columns(value[1:])),
}
"""What the values of a state must look like: one that passed through other hands has no checksum."""


def check_place(sampler: BalancedBatchSampler, state: dict) -> None:
    """Raises ValueError where the state names what is not there."""
    told = "the state was changed since it was saved: "
    base = sampler.admission.base if isinstance(sampler.admission, QueuedAdmission) else sampler.admission
    if isinstance(state["position"], dict) == isinstance(base, Admission):
        raise ValueError(f"{told}its position is {state['position']!r}")
    if not isinstance(base, Admission):
        return
    epoch, start, position = state["epoch"], state["epoch_start"], state["position"]
    begin, end = epoch * base.order.size, (epoch + 1) * base.order.size
    if start > begin or (start != begin and base.last != "carry") or not start <= position <= end:
        raise ValueError(
            f"{told}epoch {epoch} has places {begin} … {end} in the stream of epochs; it is said to have begun at {start}, and step "
            f"{state['step']} at {position}"
        )
    documents, items = (state["rest"] or [0, []])[1], (state["held"] or [[]])[0]
    if max(documents, default=0) >= len(base.items.lengths) or max(items, default=0) >= len(base.items):
        raise ValueError(f"{told}it names documents that are not there")


def items_as_saved(sampler: BalancedBatchSampler, capacity: int) -> Items | GroupedItems | StreamItems:
    """The sampler's items, cut and left out as a run with this capacity did it. ValueError where what that run could hold does
    not fit."""
    now, stream = sampler.items, isinstance(sampler.index, Unindexed)
    if capacity == now.capacity or (stream and now.too_long == "error"):
        return now
    items = items_of(sampler.index, sampler.recipe, sampler.cluster, now.too_long, capacity)
    if _alike(items, now):
        return now
    longest, limit = capacity if stream else items.longest, sampler.recipe.longest(sampler.cluster)
    if longest > limit:
        raise ValueError(
            f"the saved run holds documents or pieces of up to {longest} tokens, and a pack has room for {limit} now: "
            f"raise max_tokens_per_rank or cp"
        )
    return items


def _alike(items: Items | GroupedItems | StreamItems, other: Items | GroupedItems | StreamItems) -> bool:
    """Whether two sets of items are the same documents and pieces, under the same numbers; not known of a stream's."""
    if isinstance(items, GroupedItems) and isinstance(other, GroupedItems):
        return np.array_equal(items.member, other.member) and np.array_equal(items.offsets, other.offsets)
    if not isinstance(items, Items) or not isinstance(other, Items):
        return False
    cut = "truncate" in (items.too_long, other.too_long) and (items.num_long or other.num_long)
    names = ("removed", "piece_document", "piece_start")
    return not cut and all(np.array_equal(getattr(items, name), getattr(other, name)) for name in names)


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a run goes on: with the documents of ``rest`` (if any) as step ``step - 1``, then with ``step`` at ``position``."""

    rest: Window | None
    step: int
    position: Any
    held: Held


def stand(sampler: BalancedBatchSampler, state: dict, *, anew: bool) -> Stand:
    """Where the sampler goes on from a state; ``anew``: it was saved under another configuration.

    Raises ValueError where a step is under way that this sampler cannot plan as it was.
    """
    rest = None if state["rest"] is None else _step_of(sampler, state, *rest_from_state(state["rest"]))
    held = Held.nothing() if state["held"] is None else Held.from_state(state["held"])
    position, step = state["position"], state["step"] + (rest is not None)
    if anew and state["slot"]:
        rest, position, held = _left_of_step(sampler, state, rest)
        step = state["step"] + 1  # also where fillers alone were left
    if len(held.items) and not sampler.queued:
        if isinstance(sampler.items, StreamItems):
            raise ValueError(
                f"the saved run holds {len(held.items)} documents of the stream back, which only queues can release: resume "
                f"with a recipe that has them, or from the beginning of an epoch"
            )
        spans, targets, _ = sampler.items.spans(held.items)
        known = int(targets.sum()) if sampler.count_targets and targets is not None else None
        if rest is not None:
            spans, known = Spans.concat([rest.spans, spans]), rest.num_targets
        rest, held = _step_of(sampler, state, spans, known), Held.nothing()
        step = state["step"] + 1
    return Stand(rest=rest, step=step, position=position, held=held)


def rest_to_state(rest: Window) -> list:
    """Plain numbers."""
    return [rest.num_targets, *(getattr(rest.spans, name).tolist() for name in _SPANS)]


def rest_from_state(saved: list) -> tuple[Spans, int | None]:
    """Its spans and targets."""
    num_targets, *arrays = saved
    return Spans(**{name: np.array(array, np.int64) for name, array in zip(_SPANS, arrays, strict=True)}), num_targets


def _left_of_step(sampler: BalancedBatchSampler, state: dict, rest: Window | None) -> tuple[Window | None, Any, Held]:
    """What is left of a step planned under the saved configuration; where the next begins, and what waits then."""
    _check_under_way(sampler, state)
    before = _as_saved(sampler, state)
    epoch, step = state["epoch"], state["step"]
    plan = before.solver(rest) if rest is not None else before.plan(step, epoch)
    owner = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
    left = (plan.slot[owner] >= state["slot"]) & (plan.packs.spans.document >= 0)
    num_targets = plan.num_targets if state["num_targets"] is None else state["num_targets"]
    queued = before.admission if isinstance(before.admission, QueuedAdmission) else None
    return (
        _step_of(sampler, state, plan.packs.spans.take(np.flatnonzero(left)), num_targets) if left.any() else None,
        _behind(before, state, plan.packs.spans.take(np.flatnonzero(left))),
        queued.held(epoch, step + 1) if queued else Held.nothing(),
    )


def _behind(before: BalancedBatchSampler, state: dict, left: Spans) -> Any:
    """Where the step behind the one under way begins; of a stream what is left of this one must be read again too."""
    position = before.admission.position(state["epoch"], state["step"] + 1)
    if not isinstance(position, dict):
        return position
    pieces = np.unique(np.stack([left.document, left.start // before.items.capacity]), axis=1).T
    behind = {name: position[name] for name in ("edge", "counts", "columns")}
    return {
        **state["position"],
        **behind,
        "held": sorted(map(list, {*map(tuple, position["held"]), *map(tuple, pieces.tolist())})),
    }


def _check_under_way(sampler: BalancedBatchSampler, state: dict) -> None:
    """Raises ValueError where a step that is under way cannot be planned again as it was."""
    saved, now = state["config"], sampler.config
    told_where = (
        f"the state was saved behind micro-batch {state['slot']} of step {state['step']} of epoch {state['epoch']}"
    )
    differs = [name for name in UNDER_WAY if saved.get(name) != now.get(name)]
    if differs:
        raise ValueError(
            f"{told_where}, and what is left of a step can only be told with what planned it ({told(differs, saved, now)}); "
            f"set these as they were, or save behind a step's last micro-batch"
        )
    if sampler.recipe.place == "chunkflow":
        raise ValueError(
            f"{told_where}, and chunks of one document cannot be parted between other ranks; keep dp, cp and caps, or save "
            f"behind a step's last micro-batch"
        )


def _as_saved(sampler: BalancedBatchSampler, state: dict) -> BalancedBatchSampler:
    """A sampler of these documents with the cluster and step size of the state, standing at its step."""
    saved, options = state["config"], sampler.recipe.options
    can_queue = isinstance(options, WlbQueues) and options.max_delay > 0
    names = (
        "dp",
        "cp",
        "max_tokens_per_rank",
        "sync",
        "slots",
        "pad_tp",
        "seed",
        "shuffle",
        "order",
        "last",
        "too_long",
    )
    before = type(sampler)(
        sampler.index,
        sampler.recipe,
        **{name: saved[name] for name in names},
        **{name: saved[name] for name in SIZES if name in saved},
        speeds=saved["speeds"] and tuple(saved["speeds"]),
        evaluation=can_queue and not saved["queued"],
        cost=sampler.cost,
        count_targets=sampler.count_targets,
    )
    before.load_state_dict({**state, "config": {**before.config, "capacity": saved["capacity"]}})
    return before


def _step_of(sampler: BalancedBatchSampler, state: dict, spans: Spans, num_targets: int | None) -> Window:
    """A step of these spans, under the number of the state's; documents of one group stay together."""
    group = sampler.index.group if isinstance(sampler.index, Lengths) else None
    if group is not None:
        spans = spans.take(np.argsort(np.asarray(group)[spans.document], kind="stable"))
        atom = np.cumsum(np.diff(np.asarray(group)[spans.document], prepend=group[spans.document[0]]) != 0)
    epoch, step = state["epoch"], state["step"]
    return Window(
        epoch=epoch,
        step=step,
        key=key_of(sampler.seed, epoch, step),
        spans=spans,
        num_targets=num_targets,
        atom=np.arange(len(spans)) if group is None else atom,
    )
