"""Vocab parallelism (VP): embedding, head and cross entropy are cut over tp by vocabulary; logits are never gathered.

Each rank looks up the ids it holds (zeros for the others, so that leaving the region adds them up), computes the logits of its
own columns, and three numbers a token (maximum, sum of exponentials, logit of the label) make the softmax of the whole row.

A vocab that tp does not divide is padded at its end. Padded rows of the embedding are never looked up; padded columns of the
head are set to -inf before the softmax, so they have no share in it and their gradient is exactly 0.

Cost: forward, one all-reduce (TP) or reduce-scatter (SP) of S*B*D for the embedding, one entry for the head, one all-reduce of
S*B (maximum) and one of 2*S*B (sum and label logit); backward, the conjugates of the first two.
Source: Shoeybi et al., arXiv 1909.08053, section 3. There the sum and the label's logit are two collectives; here they are one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from minimind_tron.collectives import all_reduce
from minimind_tron.errors import TronError
from minimind_tron.layout import Cut, wider
from minimind_tron.parallel import linear

IGNORED = -100


def check_ids(ids: Tensor, labels: Tensor | None, vocab_size: int) -> None:
    """Refuse ids and labels that are not in the vocab.

    Raises: TronError that names the first of them. Cost: on a GPU, one synchronisation.
    """
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise TronError(f"token id {int(ids[outside][0])} is outside the vocab of {vocab_size}", "change --vocab-size")
    if labels is not None:
        outside = ((labels < 0) | (labels >= vocab_size)) & (labels != IGNORED)
        if outside.any():
            raise TronError(
                f"label {int(labels[outside][0])} is neither {IGNORED} nor inside the vocab of {vocab_size}",
                "change --vocab-size",
            )


def check_shape(ids_SB: Tensor, labels_SB: Tensor | None = None) -> None:
    """Refuse what is no batch of tokens.

    Raises: TronError for ids and labels that are not integers [S, B] with at least one token a sample, alike in shape.
    """
    for name, x in (("ids", ids_SB), ("labels", ids_SB if labels_SB is None else labels_SB)):
        integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not (integers and x.dim() == 2 and x.shape[0] and x.shape == ids_SB.shape):
            raise TronError(
                f"{name} of {x.dtype} {tuple(x.shape)} were given, integers [S, B] with a token a sample are wanted",
                f"change the {name}; a single sample is ids.unsqueeze(1)",
            )


def look_up(ids_SB: Tensor, weight_vD: Tensor, cut: Cut, vocab_size: int) -> Tensor:
    """This rank's share of the embedding: rows of the ids it holds, zeros elsewhere.

    Shapes: ids [S, B], weight [v, D] -> partial [S, B, D].
    """
    begin, end = cut.rows(vocab_size, cut.piece)
    elsewhere = (ids_SB < begin) | (ids_SB >= end)
    rows_SB = (ids_SB - begin).masked_fill(elsewhere, 0)
    return linear.look_up(rows_SB, weight_vD).masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _real(logits_SBv: Tensor, real_columns: int) -> Tensor:
    """The logits in the wider of float32 and their dtype, with padded columns out of the softmax."""
    logits_SBv = wide(logits_SBv)
    if real_columns == logits_SBv.shape[-1]:
        return logits_SBv
    padded_v = torch.arange(logits_SBv.shape[-1], device=logits_SBv.device) >= real_columns
    return logits_SBv.masked_fill(padded_v, -torch.inf)


class VocabCrossEntropy(Function):
    """Cross entropy of every token from logits cut by vocabulary; 0 where the label is -100.

    Keeps the logits and one log-sum-exp a token; the softmax is computed again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits_SBv: Tensor, labels_SB: Tensor, cut: Cut, vocab_size: int) -> Tensor:
        begin, end = cut.rows(vocab_size, cut.piece)
        real_SBv = _real(logits_SBv, end - begin)
        elsewhere = (labels_SB < begin) | (labels_SB >= end)
        columns_SB = (labels_SB - begin).masked_fill(elsewhere, 0)
        mine_SB = real_SBv.gather(-1, columns_SB.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        top_SB = all_reduce(real_SBv.amax(-1), cut.axis, "max")
        sums_SB = (real_SBv - top_SB.unsqueeze(-1)).exp_().sum(-1)
        sums_SB, label_SB = all_reduce(torch.stack((sums_SB, mine_SB)), cut.axis).unbind(0)
        lse_SB = top_SB + sums_SB.log()
        ignored = labels_SB == IGNORED
        ctx.real_columns = end - begin
        ctx.save_for_backward(logits_SBv, lse_SB, columns_SB, elsewhere, ignored)
        return (lse_SB - label_SB).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss_SB: Tensor) -> tuple[Tensor, None, None, None]:
        logits_SBv, lse_SB, columns_SB, elsewhere, ignored = ctx.saved_tensors
        dlogits_SBv = (_real(logits_SBv, ctx.real_columns) - lse_SB.unsqueeze(-1)).exp_()
        mine_SB1 = (~elsewhere).to(dlogits_SBv.dtype).unsqueeze(-1)
        dlogits_SBv.scatter_add_(-1, columns_SB.unsqueeze(-1), -mine_SB1)
        dlogits_SBv.mul_(dloss_SB.masked_fill(ignored, 0.0).unsqueeze(-1))
        return dlogits_SBv.to(logits_SBv.dtype), None, None, None


def wide(x: Tensor) -> Tensor:
    """The tensor in the wider of float32 and its own dtype."""
    return x.to(wider(x.dtype))


def cross_entropy(logits_SBv: Tensor, labels_SB: Tensor, cut: Cut, vocab_size: int) -> Tensor:
    """The sum of cross entropy over valid labels, the same on every rank.

    Shapes: logits [S, B, v], labels [S, B] -> scalar, in the wider of float32 and the logits' dtype.
    Cost: one all-reduce of S*B and one of 2*S*B elements, forward.
    """
    return VocabCrossEntropy.apply(logits_SBv, labels_SB, cut, vocab_size).sum()
