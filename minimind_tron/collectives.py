"""Every word that ranks say to each other, each op beside its conjugate; the ledger counts them.

An axis of size 1 is the identity, decided here and nowhere else. Collectives return new tensors; they never write into a tensor
they were given. Reductions run in the tensor's own dtype.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from minimind_tron.errors import TronError
from minimind_tron.layout import Layout, live
from minimind_tron.ledger import Entry, book
from minimind_tron.mesh import Axis, Mesh

# torch 2.13 renamed the flat collectives; 2.11 and 2.12 know the old names only.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Pending:
    """A collective under way; ``wait`` gives its result."""

    def __init__(
        self, finish: Callable[[], Tensor], *works: Any, entry: Entry | None = None, keep: tuple[Tensor, ...] = ()
    ) -> None:
        self._finish, self._works, self._entry = finish, works, entry
        # The backend reads these until the work is done.
        self._keep = keep

    def wait(self) -> Tensor:
        """The result, once it is here; to be asked for once."""
        for work in self._works:
            work.wait()
        if self._entry is not None:
            self._entry.end_s = time.perf_counter()
        # Whoever still knows this object shall not keep what was sent: a finished work does, and so does the last step.
        finish, self._finish = self._finish, _taken
        self._keep = self._works = ()
        return finish()


def _taken() -> Tensor:
    raise AssertionError("the result was taken already")


def _wire(x: Tensor, axis: Axis) -> Tensor:
    """The tensor as the backend takes it: contiguous, and on the CPU when ranks share a GPU through gloo."""
    if x.is_cuda and dist.get_backend(axis.group) == "gloo":
        return x.contiguous().cpu()
    return x.contiguous()


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin an all-reduce.

    Shapes: any; the result has the same. Cost: a rank sends 2 (n-1)/n of the tensor.
    """
    if axis.size == 1:
        return Pending(lambda: x)
    sent = _wire(x, axis)
    buffer = sent.clone() if sent.data_ptr() == x.data_ptr() else sent
    entry = book(axis, "all_reduce", 2 * (axis.size - 1) / axis.size * _bytes(buffer))
    work = dist.all_reduce(buffer, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], axis.group, async_op=True)
    return Pending(lambda: buffer.to(x.device), work, entry=entry)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum (or maximum) over the axis, on every rank."""
    return start_all_reduce(x, axis, op).wait()


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Begin an all-gather along dim 0.

    Shapes: [a, ...] -> [n * a, ...]. Cost: a rank sends n-1 times its shard.
    """
    if axis.size == 1:
        return Pending(lambda: x)
    sent = _wire(x, axis)
    whole = sent.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    entry = book(axis, "all_gather", (axis.size - 1) * _bytes(sent))
    work = _gather_flat(whole, sent, group=axis.group, async_op=True)
    return Pending(lambda: whole.to(x.device), work, entry=entry, keep=(sent,))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The shards of all ranks, concatenated along dim 0."""
    return start_all_gather(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Begin a reduce-scatter along dim 0.

    Shapes: [n * a, ...] -> [a, ...]. Cost: a rank sends (n-1)/n of the tensor.
    """
    if axis.size == 1:
        return Pending(lambda: x)
    assert x.shape[0] % axis.size == 0, f"dim 0 of {tuple(x.shape)} is not a multiple of {axis.size}"
    sent = _wire(x, axis)
    shard = sent.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    entry = book(axis, "reduce_scatter", (axis.size - 1) / axis.size * _bytes(sent))
    work = _scatter_flat(shard, sent, group=axis.group, async_op=True)
    return Pending(lambda: shard.to(x.device), work, entry=entry, keep=(sent,))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's shard, along dim 0, of the sum over the axis."""
    return start_reduce_scatter(x, axis).wait()


@dataclass(frozen=True)
class Parcel:
    """What a message between two ranks is: its shape, dtype and device, its tag, and whether it belongs to the backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tag: int
    backward: bool


def start_send(x: Tensor, parcel: Parcel, axis: Axis, peer: int) -> Pending:
    """Begin to send a tensor to a rank of an axis; it must not change before ``wait`` returns, when it was received.

    Cost: the tensor's bytes.
    """
    return start_exchange(x, parcel, None, axis, peer)[0]


def start_receive(parcel: Parcel, axis: Axis, peer: int) -> Pending:
    """Begin to receive a tensor from a rank of an axis."""
    return start_exchange(None, None, parcel, axis, peer)[1]


def start_exchange(
    x: Tensor | None, sent: Parcel | None, received: Parcel | None, axis: Axis, peer: int
) -> tuple[Pending, Pending]:
    """Begin to send to and to receive from one rank of an axis, posted together.

    Cost: the bytes of the tensor that is sent.
    """
    operations, pending = [], []
    if x is not None and sent is not None:
        outgoing = _wire(x, axis)
        entry = book(axis, "send", _bytes(outgoing), sent.backward)
        operations.append(dist.P2POp(dist.isend, outgoing, axis.ranks[peer], axis.group, sent.tag))
        pending.append(partial(Pending, lambda: x, entry=entry, keep=(outgoing,)))
    if received is not None:
        shared = received.device.type == "cuda" and dist.get_backend(axis.group) == "gloo"
        buffer = torch.empty(received.shape, dtype=received.dtype, device="cpu" if shared else received.device)
        entry = book(axis, "receive", 0, received.backward)
        operations.append(dist.P2POp(dist.irecv, buffer, axis.ranks[peer], axis.group, received.tag))
        pending.append(partial(Pending, lambda: buffer.to(received.device), entry=entry))
    works = dist.batch_isend_irecv(operations)
    # gloo gives a work for each operation, nccl one for all of them.
    started = [make(works[min(i, len(works) - 1)]) for i, make in enumerate(pending)]
    return started[0], started[-1]


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Begin to pass a tensor on to the next rank of an axis, the last one to the first; the result is that of the rank before.

    Cost: the tensor's bytes.
    """
    if axis.size == 1:
        return Pending(lambda: x)
    sent = _wire(x, axis)
    buffer = torch.empty_like(sent)
    entry = book(axis, "shift", _bytes(sent))
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    operations = [dist.P2POp(dist.isend, sent, after, axis.group), dist.P2POp(dist.irecv, buffer, before, axis.group)]
    works = dist.batch_isend_irecv(operations)
    return Pending(lambda: buffer.to(x.device), *works, entry=entry, keep=(sent,))


def exchange_parts(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all: part i of dim 0 goes to rank i, and the result has a part from each, in coordinate order.

    Shapes: [n, ...] -> [n, ...]. Cost: a rank sends (n-1)/n of the tensor.
    """
    if axis.size == 1:
        return x
    sent = _wire(x, axis)
    received = torch.empty_like(sent)
    entry = book(axis, "all_to_all", (axis.size - 1) / axis.size * _bytes(sent))
    work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
    return Pending(lambda: received.to(x.device), work, entry=entry, keep=(sent,)).wait()


def shard(x: Tensor, axis: Axis) -> Tensor:
    """This rank's equal part of dim 0, as a view; nothing is sent."""
    return x.chunk(axis.size)[axis.rank]


def gather_copies(local: Tensor, axis: Axis) -> list[Tensor]:
    """The tensors of all ranks of an axis, in coordinate order."""
    return list(all_gather(local.unsqueeze(0), axis).unbind(0))


def gather_local(kept: Tensor, layout: Layout) -> Tensor:
    """The local tensor of which a rank keeps what ZeRO leaves it, on every rank of that axis.

    Shapes: [rows, ...] -> layout.local_shape. Cost: a rank sends n-1 times the largest piece.
    """
    if layout.shard is None:
        return kept
    rows = layout.shard.padded_piece(layout.local_shape[0])
    padded = torch.cat((kept, kept.new_zeros(rows - kept.shape[0], *kept.shape[1:])))
    return all_gather(padded, layout.shard.axis)[: layout.local_shape[0]]


def gather_whole(kept: Tensor, layout: Layout) -> Tensor:
    """The whole, unpadded tensor that what a rank keeps is a part of, on every rank of the axes that cut it.

    Shapes: layout.local_shape, or what ZeRO leaves of it -> layout.shape. Cost: a rank sends n-1 times its local tensor.
    """
    local = gather_local(kept, layout)
    return layout.join(gather_copies(local, layout.cut.axis) if layout.cut else [local])


def gather_objects(thing: Any, axis: Axis) -> list[Any]:
    """The objects of all ranks of an axis, in coordinate order; for reports and names, not for tensors of a model."""
    if axis.size == 1:
        return [thing]
    things = [None] * axis.size
    dist.all_gather_object(things, thing, axis.group)
    return things


def gather_named(named: dict[str, Tensor], axis: Axis) -> dict[str, Tensor]:
    """The tensors that the ranks of an axis have between them, on every rank; of a name that several have, the first rank's.

    Cost: a broadcast of every tensor, one after the other, and one of names and shapes.
    """
    if axis.size == 1:
        return named
    found: dict[str, Tensor] = {}
    kinds = gather_objects({name: (tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in named.items()}, axis)
    for rank, theirs in enumerate(kinds):
        for name, (shape, dtype, device) in theirs.items():
            if name not in found:
                mine = named[name] if rank == axis.rank else torch.empty(shape, dtype=dtype, device=device)
                buffer = _wire(mine.detach(), axis)
                dist.broadcast(buffer, axis.ranks[rank], axis.group)
                found[name] = buffer.to(mine.device)
    return found


def share(thing: Any, mesh: Mesh) -> Any:
    """What global rank 0 has, on every rank: along one axis after the other, so that no group of all ranks is needed.

    Cost: a broadcast of the pickled object per axis; for reports and decisions, not for tensors of a model.
    """
    for axis in live(mesh.dp, mesh.pp, mesh.cp, mesh.tp):
        box = [thing]
        dist.broadcast_object_list(box, axis.ranks[0], axis.group)
        thing = box[0]
    return thing


def settle(check: Callable[[], None], mesh: Mesh) -> None:
    """Run a check on global rank 0; what it refuses, every rank refuses.

    Raises: TronError, the same on every rank.
    """
    problem: tuple[str, str] | None = None
    if mesh.rank == 0:
        try:
            check()
        except TronError as error:
            problem = error.what, error.fix
    problem = share(problem, mesh)
    if problem:
        raise TronError(*problem)


def sum_over(x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """The sum over several axes, one after the other."""
    for axis in live(*axes):
        x = all_reduce(x, axis)
    return x


class CopyIn(Function):
    """Replicated -> one copy for each rank's part of the work: identity; backward all-reduce, since each rank knows a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy, ctx.axis), None


class SumOut(Function):
    """Partial sums -> replicated: all-reduce; backward identity, since every rank's part counts once in the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis).view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class GatherIn(Function):
    """Shards of dim 0 -> whole: all-gather; backward reduce-scatter, since each rank knows a part of the whole's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis).view_as(x) if axis.size == 1 else all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.axis), None


class ScatterOut(Function):
    """Partial sums -> shards of dim 0: reduce-scatter; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis).view_as(x) if axis.size == 1 else reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


class AllToAll(Function):
    """Parts of dim 0 -> a part from every rank; backward the same, each gradient going back where its part came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return exchange_parts(x, axis).view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return exchange_parts(dy, ctx.axis), None


def copy_in(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward all-reduce."""
    return CopyIn.apply(x, axis)


def sum_out(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce; backward identity."""
    return SumOut.apply(x, axis)


def gather_in(x: Tensor, axis: Axis) -> Tensor:
    """All-gather along dim 0; backward reduce-scatter."""
    return GatherIn.apply(x, axis)


def scatter_out(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter along dim 0; backward all-gather."""
    return ScatterOut.apply(x, axis)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all over dim 0; backward the same."""
    return AllToAll.apply(x, axis)
