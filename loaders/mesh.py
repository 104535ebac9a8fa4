"""Where this process stands in the dp x cp plane, and the CPU group that spans it.

All randomness and every plan are keyed by these coordinates, so ranks that differ only in other axes (tp, pp) get the
same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
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


def coordinates(mesh: DeviceMesh | None, dp: int | None, cp: int | None, rank: int | None) -> Place:
    """From a mesh with axes named dp and/or cp, or from numbers. Raises ValueError for both, neither or no such axis."""
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
    names = mesh.mesh_dim_names or ()
    if "dp" not in names and "cp" not in names:
        raise ValueError(f"the mesh needs an axis named 'dp' or 'cp'; it has {names or 'no names'}")
    sizes = [mesh.size(names.index(name)) if name in names else 1 for name in ("dp", "cp")]
    at = [mesh.get_local_rank(name) if name in names else 0 for name in ("dp", "cp")]
    plane = [names.index(name) for name in ("dp", "cp") if name in names]
    others = [axis for axis in range(len(names)) if axis not in plane]
    planes = mesh.mesh.permute(*others, *plane).reshape(-1, sizes[0] * sizes[1])
    return Place(dp=sizes[0], cp=sizes[1], rank=at[0] * sizes[1] + at[1], planes=tuple(map(tuple, planes.tolist())))


def cpu_group(place: Place, timeout: float) -> dist.ProcessGroup | None:
    """A gloo group over this rank's plane, made by all ranks together; None where torch.distributed does not run, or
    where the plane is not known to be the whole world (pass ``group=`` or ``mesh=`` then)."""
    if not dist.is_initialized() or place.dp * place.cp == 1:
        return None
    if place.planes is None:
        if place.dp * place.cp != dist.get_world_size():
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    mine = None
    for plane in place.planes:
        group = dist.new_group(list(plane), backend="gloo", timeout=timedelta(seconds=timeout))
        if dist.get_rank() in plane:
            mine = group
    return mine
