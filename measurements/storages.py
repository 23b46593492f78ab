"""Bytes that are allocated, counted on any device without the allocator's help."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that were allocated while it is on and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_iter(made):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before:
                self._count(x.untyped_storage())
        return made

    def held(self) -> int:
        """Bytes of those storages as they are now: one may have been freed or filled again under the tensors that have it."""
        found = [seen() for seen in self._seen.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
