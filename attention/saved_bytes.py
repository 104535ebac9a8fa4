"""How many bytes autograd keeps for backward, counted where it keeps them, on any device.

What is decided: a storage counts once however many views of it are kept, from when the first is saved until the last is
dropped; storages of the model's parameters do not count, nor does what lies outside of autograd, such as ChunkFlow's store.

Cost: some microseconds per saved tensor: for measurements.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> with SavedBytes(net) as saved:
    ...     loss = net(torch.zeros(10, 4)).sum()
    >>> saved.now == saved.most == 10 * (4 + 8) * 4                                     # the inputs of both layers
    True
    >>> loss.backward()
    >>> saved.now, saved.most
    (0, 480)
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Counts while it is entered. `now`: bytes kept at present; `most`: at any time so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = self.most = 0
        self._owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._held: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> object:
        return tensor if tensor.untyped_storage().data_ptr() in self._owned else _Saved(self, tensor)

    def hold(self, place: int, size: int, change: int) -> None:
        """One more (change 1) or one fewer (-1) kept tensor of the storage at `place`, of `size` bytes."""
        before = self._held.get(place, 0)
        self._held[place] = before + change
        self.now += size * ((before + change > 0) - (before > 0))
        self.most = max(self.most, self.now)


class _Saved:
    """A kept tensor; it ends with the graph that keeps it."""

    def __init__(self, count: SavedBytes, tensor: Tensor) -> None:
        self.count, self.tensor = count, tensor
        self.storage = tensor.untyped_storage()
        self.count.hold(self.storage.data_ptr(), self.storage.nbytes(), 1)

    def __del__(self) -> None:
        self.count.hold(self.storage.data_ptr(), self.storage.nbytes(), -1)


def _unpack(saved: Any) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved
