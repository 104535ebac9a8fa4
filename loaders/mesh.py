"""Where this process stands in the dp x cp plane, and what its ranks meet through: a CPU group, the job's store.

All randomness and every plan are keyed by these coordinates, so ranks that differ only in other axes (tp, pp) get the
same batches. A mesh may have any of the axes dp (or several that begin with ``dp_``, as HSDP has) and cp, and any others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates in the plane: ``rank = replica * cp + cp_rank``. ``planes`` lists the global ranks of every plane."""

    dp: int
    cp: int
    rank: int
    planes: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_ranks(self) -> int:
        """Of the plane."""
        return self.dp * self.cp


def coordinates(mesh: DeviceMesh | None, dp: int | None, cp: int | None, rank: int | None) -> Place:
    """From a mesh with named axes, or from numbers. Raises ValueError for both, neither or a mesh without names."""
    if mesh is None:
        if dp is None:
            raise ValueError("say where this process stands: give dp= (and cp=, rank=), or mesh=")
        if rank is None:
            if dp * (cp or 1) > 1 and not dist.is_initialized():
                raise ValueError(
                    f"rank is needed for dp={dp} x cp={cp or 1} where torch.distributed is not initialised"
                )
            rank = dist.get_rank() if dist.is_initialized() else 0
        return Place(dp=dp, cp=cp or 1, rank=rank)
    if dp is not None or cp is not None or rank is not None:
        raise ValueError(f"give mesh= or dp=, cp=, rank=, not both; got mesh and dp={dp}, cp={cp}, rank={rank}")
    if not mesh.mesh_dim_names:
        raise ValueError("the mesh needs names for its axes, such as ('dp', 'cp'); it has none")
    names = mesh.mesh_dim_names
    replicas = [axis for axis, name in enumerate(names) if name == "dp" or name.startswith("dp_")]
    groups = [axis for axis, name in enumerate(names) if name == "cp"]
    others = [axis for axis in range(len(names)) if axis not in replicas + groups]
    shape = [mesh.size(axis) for axis in replicas + groups]
    at = [mesh.get_local_rank(names[axis]) for axis in replicas + groups]
    plane = 0
    for size, coordinate in zip(shape, at, strict=True):
        plane = plane * size + coordinate
    sizes = [prod(mesh.size(axis) for axis in axes) for axes in (replicas, groups)]
    planes = mesh.mesh.permute(*others, *replicas, *groups).reshape(-1, sizes[0] * sizes[1])
    return Place(dp=sizes[0], cp=sizes[1], rank=plane, planes=tuple(map(tuple, planes.tolist())))


def cpu_group(place: Place, timeout: float) -> dist.ProcessGroup | None:
    """A gloo group over this rank's plane, made by all ranks together; None where torch.distributed does not run, or
    where the plane is not known to be the whole world (pass ``group=`` or ``mesh=`` then)."""
    if not dist.is_initialized() or place.num_ranks == 1:
        return None
    if place.planes is None:
        if place.num_ranks != dist.get_world_size():
            return None
        return _met(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    mine = None
    for plane in place.planes:
        group = dist.new_group(list(plane), backend="gloo", timeout=timedelta(seconds=timeout))
        if dist.get_rank() in plane:
            mine = group
    return mine and _met(mine)


def _met(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, once all have it: a rank that closes its end at once, for what it is to serve is refused, would else be an
    error of the connection to those that are still connecting."""
    dist.barrier(group=group)
    return group


def end_group(group: dist.ProcessGroup | None, owner: int) -> None:
    """Close a group that process ``owner`` made; not in a worker, which inherits it by fork and may collect its loader."""
    if group is not None and os.getpid() == owner and dist.is_initialized():
        dist.destroy_process_group(group)


def plan_store(place: Place) -> dist.Store:
    """The job's store, through which ranks tell each other plans; planes, which plan the same steps, have each their own keys.

    Raises ValueError where torch.distributed does not run.
    """
    if not dist.is_initialized():
        raise ValueError(
            "share_planning=True needs torch.distributed, whose store carries the plans: initialise it first"
        )
    store: dist.Store = dist.distributed_c10d._get_default_store()
    if place.planes is None:
        return store
    plane = next(at for at, ranks in enumerate(place.planes) if dist.get_rank() in ranks)
    return dist.PrefixStore(f"equipoise plane {plane}", store)
