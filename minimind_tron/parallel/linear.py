"""What the strategies share about linear layers: the cut weights, the local GEMM and its two gradients.

A column linear cuts the output features, a row linear the input features; a column, something element-wise and a row make a
region that needs a collective only where it is entered and where it is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from minimind_tron.layout import Cut, LaidOut, Layout, Storage, live, parameter
from minimind_tron.mesh import Axis


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out]; which part of them a rank holds is the subclass's affair."""

    weight: LaidOut
    bias: LaidOut | None


class ColumnLinear(Linear):
    """Weights [out, in] whose output features are cut over an axis, into fewer parts than ranks if asked.

    With fewer parts, consecutive ranks share a piece and each uses it for a part of the work, so its gradient is a part too.
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
    ) -> None:
        super().__init__()
        cut = Cut(0, axis, parts or axis.size)
        partial = live(axis.sharing(cut.parts))
        self.weight = parameter(Layout((out_features, in_features), "normal", cut, partial), storage)
        self.bias = parameter(Layout((out_features,), "zeros", cut, partial), storage) if bias else None


class WholeLinear(Linear):
    """Weights [out, in] that every rank holds whole; ``outside`` are the axes whose ranks feed it different hidden states."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        outside: tuple[Axis, ...] = (),
        storage: Storage,
    ) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), "normal", partial=outside), storage)
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

    ``columns`` enters a region through linears that share one collective, ``leave`` turns partial sums into hidden states, ``own``
    picks the ids or labels of this rank's hidden states, ``total`` makes the loss of all from the loss of those. ``outside`` are
    the axes whose ranks hold different hidden states outside of regions, ``multiple`` is what the sequence is padded to.
    """

    axis: Axis
    columns: Callable[[Tensor, Sequence[Linear], Axis], tuple[Tensor, ...]]
    leave: Callable[[Tensor, Axis], Tensor]
    own: Callable[[Tensor, Axis], Tensor]
    total: Callable[[Tensor, Axis], Tensor]
    outside: tuple[Axis, ...]
    multiple: int

    def row(self, x_SBf: Tensor, linear: RowLinear) -> Tensor:
        """Leave a region through a row linear.

        Shapes: [S, B, f] -> [s, B, D], or [S, B, D] under plain TP. Cost: that of ``leave``.
        """
        y = self.leave(F.linear(x_SBf, linear.weight), self.axis)
        return y if linear.bias is None else y + linear.bias


def flat(x: Tensor) -> Tensor:
    """The tensor as a matrix [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def project(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """One input through several local GEMMs.

    Shapes: x [..., in] -> one [..., out_i] each.
    """
    return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)


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
