"""Sequence parallelism (SP): as tensor parallelism, but outside of the regions each rank holds a shard of the sequence.

What TP does with an all-reduce is here split in its two halves: the region is left through a reduce-scatter and entered through
an all-gather. The same bytes travel, but norms, residuals and what they keep for backward shrink by tp. The price: every weight
used outside of a region saw only this rank's tokens, so its gradient is a part and must be summed over tp.

Cost: forward per block 2 all-gathers and 2 reduce-scatters of S*B*D; backward 2 and 2 (the conjugates). This form keeps the
gathered input for the weight gradient; ``overlap.py`` has the one that gathers it again.
Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198. There the sequence
must be divisible by tp; here the model pads it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minimind_tron import collectives
from minimind_tron.collectives import all_gather, gather_in, reduce_scatter, scatter_out, sum_out
from minimind_tron.mesh import Axis
from minimind_tron.parallel.linear import Linear, input_gradient, now_or_later, project, weight_gradient
from minimind_tron.parallel.segments import kept


def columns(x_sBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """Enter a region: gather the sequence once, then several column linears.

    Shapes: [s, B, D] -> one [S, B, f_i] each. Cost: one all-gather forward, one reduce-scatter backward, of S*B*D.
    """
    x_SBD = gather_in(x_sBD, axis)
    return project(x_SBD, linears)


def leave(partial_SBD: Tensor, axis: Axis) -> Tensor:
    """Leave a region: partial sums become this rank's shard of the hidden states.

    Shapes: [S, B, D] -> [s, B, D]. Cost: one reduce-scatter forward, one all-gather backward, of S*B*D.
    """
    return scatter_out(partial_SBD, axis)


class RowScatter(Function):
    """A row linear's local GEMM and the reduce-scatter of its partial sums; backward an all-gather and two local GEMMs.

    One Function, so that what is kept for a second forward is the shard of the sum, which need not be made twice.
    """

    @staticmethod
    def forward(ctx: Any, x_SBf: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x_SBf, weight)
        return kept(lambda: reduce_scatter(F.linear(x_SBf, weight), axis))

    @staticmethod
    def backward(ctx: Any, dy_sBD: Tensor) -> tuple[Tensor | None, ...]:
        x_SBf, weight = ctx.saved_tensors
        dy_SBD = all_gather(dy_sBD.contiguous(), ctx.axis)
        dx_SBf = input_gradient([dy_SBD], [weight])
        (dw,) = now_or_later([weight], lambda: [weight_gradient(dy_SBD, x_SBf)])
        return dx_SBf, dw, None


def rows(x_SBf: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Leave a region through a row linear's weight.

    Shapes: x [S, B, f], weight [D, f] -> [s, B, D]. Cost: one reduce-scatter forward, one all-gather backward, of S*B*D.
    """
    return cast(Tensor, RowScatter.apply(x_SBf, weight, axis))


def own(x_SB: Tensor, axis: Axis) -> Tensor:
    """The part of ids or labels that belongs to this rank's shard.

    Shapes: [S, ...] -> [s, ...].
    """
    return collectives.shard(x_SB, axis)


def total(loss: Tensor, axis: Axis) -> Tensor:
    """The loss of all hidden states from that of this rank's shard.

    Cost: one all-reduce of a scalar, forward.
    """
    return sum_out(loss, axis)
