"""What the strategies share about linear layers: the cut weights, the local GEMM and its two gradients, now or later.

A column linear cuts the output features, a row linear the input features; a column, something element-wise and a row make a
region that needs a collective only where it is entered and where it is left.

The weight gradient is nobody's input. Inside of ``putting_off`` a backward leaves it undone, and whoever opened that does it when
there is time: that is what the zero-bubble schedules of pipelines live on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from minimind_tron.layout import Cut, LaidOut, Layout, Storage, live, parameter
from minimind_tron.mesh import Axis
from minimind_tron.parallel.segments import kept


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out]; which part of them a rank holds is the subclass's affair."""

    weight: LaidOut
    bias: LaidOut | None


class ColumnLinear(Linear):
    """Weights [out, in] whose output features are cut over an axis, into fewer parts than ranks if asked.

    With fewer parts, consecutive ranks share a piece and each uses it for a part of the work, so its gradient is a part too.
    ``tied`` are the axes whose ranks use the same weights for something else, one as the embedding and one as the head.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        parts: int | None = None,
        bias: bool = False,
        storage: Storage,
        tied: tuple[Axis, ...] = (),
    ) -> None:
        super().__init__()
        cut = Cut(0, axis, parts or axis.size)
        partial = live(axis.sharing(cut.parts)) + tied
        self.weight = parameter(Layout((out_features, in_features), "normal", cut, partial), storage)
        self.bias = parameter(Layout((out_features,), "zeros", cut, partial), storage) if bias else None


class WholeLinear(Linear):
    """Weights [out, in] that every rank holds whole; ``outside`` are the axes whose ranks feed it different hidden states.

    ``tied`` is as in ``ColumnLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        outside: tuple[Axis, ...] = (),
        storage: Storage,
        tied: tuple[Axis, ...] = (),
    ) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), "normal", partial=outside + tied), storage)
        self.bias = None


class RowLinear(Linear):
    """Weights [out, in] whose input features are cut over an axis; the bias is whole on every rank.

    The bias is added once, after the partial sums were added up, to the hidden states outside of the region; ``outside`` are the
    axes whose ranks hold different parts of those.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        outside: tuple[Axis, ...] = (),
        bias: bool = False,
        storage: Storage,
    ) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), "normal", Cut(1, axis, axis.size)), storage)
        self.bias = parameter(Layout((out_features,), "zeros", partial=outside), storage) if bias else None


@dataclass(frozen=True)
class Seams:
    """How hidden states cross the border of a region whose weights are cut over an axis; the one thing in which TP and SP differ.

    ``columns`` enters a region through linears that share one collective, ``leave`` turns partial sums into hidden states, ``rows``
    does so behind a weight, ``own`` picks the ids or labels of this rank's hidden states, ``total`` makes the loss of all from the
    loss of those. ``outside`` are the axes whose ranks hold different hidden states outside of regions, ``multiple`` is what the
    sequence is padded to.
    """

    axis: Axis
    columns: Callable[[Tensor, Sequence[Linear], Axis], tuple[Tensor, ...]]
    leave: Callable[[Tensor, Axis], Tensor]
    rows: Callable[[Tensor, Tensor, Axis], Tensor]
    own: Callable[[Tensor, Axis], Tensor]
    total: Callable[[Tensor, Axis], Tensor]
    outside: tuple[Axis, ...]
    multiple: int

    def row(self, x_SBf: Tensor, linear: RowLinear) -> Tensor:
        """Leave a region through a row linear.

        Shapes: [S, B, f] -> [s, B, D], or [S, B, D] under plain TP. Cost: that of ``leave``.
        """
        y = self.rows(x_SBf, linear.weight, self.axis)
        return y if linear.bias is None else y + linear.bias


def flat(x: Tensor) -> Tensor:
    """The tensor as a matrix [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def project(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """One input through several local GEMMs.

    Shapes: x [..., in] -> one [..., out_i] each.
    """
    return tuple(multiply(x, linear.weight, linear.bias) for linear in linears)


def input_gradient(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """What several local GEMMs on one input hand back to it, summed.

    Shapes: dys [..., out_i], weights [out_i, in] -> [..., in].
    """
    dx = flat(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(flat(dy), weight)
    return dx.view(*dys[0].shape[:-1], -1)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of one local GEMM's weight.

    Shapes: dy [..., out], x [..., in] -> [out, in].
    """
    return flat(dy).T @ flat(x)


def bias_gradient(dy: Tensor) -> Tensor:
    """The gradient of one local GEMM's bias.

    Shapes: dy [..., out] -> [out].
    """
    return flat(dy).sum(0)


WeightWork = Callable[[], None]
_put_off: list[WeightWork] | None = None


@contextmanager
def putting_off() -> Iterator[list[WeightWork]]:
    """Collect the weight gradients of every backward inside, instead of computing them; calling one adds it to ``grad``.

    Raises: AssertionError when one is open already.
    """
    global _put_off
    assert _put_off is None, "weight gradients are being put off already"
    works: list[WeightWork] = []
    _put_off = works
    try:
        yield works
    finally:
        _put_off = None


def is_putting_off() -> bool:
    """Whether weight gradients are left for later."""
    return _put_off is not None


@torch.no_grad()
def _add(weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
    for weight, gradient in zip(weights, compute(), strict=True):
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def now_or_later(weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """The gradients of some weights, as a backward returns them: computed, or put off and None."""
    if _put_off is None:
        return compute()
    _put_off.append(lambda: _add(weights, compute))
    return [None] * len(weights)


class Multiply(Function):
    """A local GEMM: x times a weight [out, in], plus a bias; the weight's gradient now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return kept(lambda: F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dx = input_gradient([dy], [weight]) if ctx.needs_input_grad[0] else None
        (found,) = now_or_later([weight], lambda: [weight_gradient(dy, x)])
        return dx, found, bias_gradient(dy) if ctx.biased else None


class LookUp(Function):
    """Rows of a table [v, D] by number; the table's gradient now or later."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        size = weight.shape[0]
        (found,) = now_or_later([weight], lambda: [torch.ops.aten.embedding_dense_backward(dy, rows, size, -1, False)])
        return None, found


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A local GEMM.

    Shapes: x [..., in], weight [out, in] -> [..., out].
    """
    return cast(Tensor, Multiply.apply(x, weight, bias))


def look_up(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table.

    Shapes: rows [...], weight [v, D] -> [..., D].
    """
    return cast(Tensor, LookUp.apply(rows, weight))
