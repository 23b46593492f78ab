"""Tensor parallelism (TP): every matrix is cut over tp; outside of the regions all ranks hold the same hidden states.

A region is entered by ``columns`` and left by ``leave``. Forward, nothing is sent on entry (all ranks have x) and one all-reduce
adds up the partial sums on leaving; backward, the reverse.

Cost: 2 all-reduces of S*B*D forward per block (attention and feed-forward), 2 backward.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053. There, q, k and v are one fused matrix; here they stay three, as in Hugging
Face's names, and share one entry.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minimind_tron.collectives import all_reduce, copy_in, sum_out
from minimind_tron.config import ModelConfig
from minimind_tron.mesh import Axis
from minimind_tron.parallel.linear import Linear, input_gradient, now_or_later, project, weight_gradient
from minimind_tron.parallel.segments import kept


def columns(x_SBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """Enter a region: one input, several column linears, one collective (in the backward).

    Shapes: [S, B, D] -> one [S, B, f_i] each. Cost: backward, one all-reduce of S*B*D.
    """
    return project(copy_in(x_SBD, axis), linears)


def leave(partial_SBD: Tensor, axis: Axis) -> Tensor:
    """Leave a region: partial sums become hidden states.

    Shapes: [S, B, D] -> [S, B, D]. Cost: forward, one all-reduce of S*B*D.
    """
    return sum_out(partial_SBD, axis)


class RowSum(Function):
    """A row linear's local GEMM and the all-reduce of its partial sums; backward two local GEMMs.

    One Function, so that what is kept for a second forward is the sum, which need not be made twice.
    """

    @staticmethod
    def forward(ctx: Any, x_SBf: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x_SBf, weight)
        return kept(lambda: all_reduce(F.linear(x_SBf, weight), axis))

    @staticmethod
    def backward(ctx: Any, dy_SBD: Tensor) -> tuple[Tensor | None, ...]:
        x_SBf, weight = ctx.saved_tensors
        dy_SBD = dy_SBD.contiguous()
        dx_SBf = input_gradient([dy_SBD], [weight])
        (dw,) = now_or_later([weight], lambda: [weight_gradient(dy_SBD, x_SBf)])
        return dx_SBf, dw, None


def rows(x_SBf: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Leave a region through a row linear's weight.

    Shapes: x [S, B, f], weight [D, f] -> [S, B, D]. Cost: forward, one all-reduce of S*B*D.
    """
    return cast(Tensor, RowSum.apply(x_SBf, weight, axis))


def own(x_SB: Tensor, axis: Axis) -> Tensor:
    """The part of ids or labels that belongs to this rank's hidden states: all of it.

    Shapes: [S, ...] -> [S, ...].
    """
    return x_SB


def total(loss: Tensor, axis: Axis) -> Tensor:
    """The loss of all hidden states from that of this rank's: the same, since all ranks hold all of them."""
    return loss


def kv_parts(config: ModelConfig, axis: Axis) -> int:
    """Into how many parts k and v are cut: with fewer kv heads than ranks, ranks share a head."""
    return min(config.num_key_value_heads, axis.size)
