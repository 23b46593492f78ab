"""Ring attention (CP): blocks of K and V go round the ranks, and each rank's queries meet one after the other.

Forward, while a rank computes with one block, the next is under way: its neighbour's. Blocks that none of its queries may see are
passed on and not computed with. What a block adds is merged by log-sum-exp, in float32 or wider.

Backward, K and V go round again, and their gradients travel behind them, a step later, each on its own hop: a rank adds what its
queries hand to the block it has at hand, and passes the sum on. A block's own rank begins with its share and keeps it at home; the
last hop brings the others' sum. So cp-1 hops of each do.

Memory: beside its own tokens a rank holds two blocks of K and V, the one at hand and the one under way, and in the backward two
blocks of gradients. That is why a gradient's hop is waited for before the next block is begun: computing with one sum sent, one
arriving and a new share growing would take a third.

Cost: cp-1 blocks of 2*c*B*k*H sent forward; backward as many, and as many in float32 or wider.
Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv 2310.01889. There each block of gradients makes cp hops.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from minimind_tron.collectives import start_shift
from minimind_tron.parallel.attention import Attended, Gradients, zeros_for
from minimind_tron.parallel.context import SequenceMap


class RingAttention(Function):
    """Attention while K and V go round; keeps q, k, v, the output and one lse a query and head, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceMap) -> Tensor:
        axis, attended = sequence.axis, Attended(q, k.shape[2])
        block = own = torch.stack((k, v))
        for step in range(axis.size):
            under_way = start_shift(block, axis) if step + 1 < axis.size else None
            tile = sequence.tile((axis.rank - step) % axis.size, q.shape[0])
            if tile:
                attended.add(block, tile)
            if under_way:
                block = under_way.wait()
        out, lse = attended.result()
        ctx.sequence = sequence
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, block, out, lse = ctx.saved_tensors
        sequence, axis = ctx.sequence, ctx.sequence.axis
        gradients, own = Gradients(dout, q, out, lse, block.shape[3]), zeros_for(block)
        # What other ranks found for the block at hand; its own rank's share stays at home.
        travelling: Tensor | None = None
        for step in range(axis.size):
            under_way = start_shift(block, axis) if step + 1 < axis.size else None
            if step == 1:
                travelling = zeros_for(block)
            tile = sequence.tile((axis.rank - step) % axis.size, q.shape[0])
            if tile:
                gradients.add(block, tile, own if travelling is None else travelling)
            if travelling is not None:
                travelling = start_shift(travelling, axis).wait()
            if under_way:
                block = under_way.wait()
        if travelling is not None:
            own += travelling
        return (*gradients.results(own), None)


def attend(q_cBnH: Tensor, k_cBkH: Tensor, v_cBkH: Tensor, sequence: SequenceMap) -> Tensor:
    """Causal attention of this rank's queries, blocks of K and V going round.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H].
    Cost: forward cp-1 messages of 2*c*B*k*H; backward as many, and as many in float32 or wider.
    """
    return cast(Tensor, RingAttention.apply(q_cBnH, k_cBkH, v_cBkH, sequence))
