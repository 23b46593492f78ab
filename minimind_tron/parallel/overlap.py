"""TP and SP entries that hide the collective of the input gradient, or gather the input again instead of keeping it.

The maths is that of ``tensor.columns`` and ``sequence.columns``. Two independent switches give four entries:

- *hidden*: the backward starts the collective of the input gradient, computes the weight gradients while it runs, then waits;
- *regathered* (SP): forward keeps only the shard x_sBD; backward gathers x_SBD again for the weight gradients.

Each is an autograd Function over all linears that share the entry, because autograd by itself would finish the input gradient's
collective before it begins a weight gradient.

Cost: those of the plain entries; regathered, one all-gather of S*B*D more in the backward, and S*B*D less kept per entry.
Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2, for the second gather.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minimind_tron.collectives import (
    Pending,
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from minimind_tron.mesh import Axis
from minimind_tron.parallel.linear import Linear, bias_gradient, input_gradient, is_putting_off, now_or_later, weight_gradient
from minimind_tron.parallel.segments import kept

Optional = Tensor | None


def _forward(ctx: Any, x: Tensor, whole: Callable[[], Tensor], axis: Axis, tensors: tuple[Optional, ...]) -> tuple[Tensor, ...]:
    """The local GEMMs on the whole input; x is what is saved of it.

    ``tensors`` are weight, bias, weight, bias ..., a bias being None where there is none.
    """
    weights, biases = cast(tuple[Tensor, ...], tensors[::2]), tensors[1::2]
    ctx.axis, ctx.biased = axis, [bias is not None for bias in biases]
    ctx.save_for_backward(x, *weights)

    def compute() -> tuple[Tensor, ...]:
        x_SBD = whole()
        return tuple(F.linear(x_SBD, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    return kept(compute)


def _saved(ctx: Any, dys: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The input that was saved, the weights, and the incoming gradients laid out for GEMMs (each is used twice)."""
    x, *weights = ctx.saved_tensors
    return x, weights, [dy.contiguous() for dy in dys]


def _parameter_gradients(ctx: Any, weights: list[Tensor], dys: Sequence[Tensor], whole: Callable[[], Tensor]) -> list[Optional]:
    """Weight gradients, now or later, and bias gradients; ``whole`` gives the whole input when it is needed."""

    def compute() -> list[Tensor]:
        x_SBD = whole()
        return [weight_gradient(dy, x_SBD) for dy in dys]

    found: list[Optional] = []
    for dw, dy, biased in zip(now_or_later(weights, compute), dys, ctx.biased, strict=True):
        found += [dw, bias_gradient(dy) if biased else None]
    return found


def _hidden_backward(ctx: Any, dys: tuple[Tensor, ...], start: Callable[[Tensor, Axis], Pending]) -> tuple[Optional, ...]:
    """Input gradient, its collective, the weight gradients beside it; the whole input was kept."""
    x_SBD, weights, grads = _saved(ctx, dys)
    dx = start(input_gradient(grads, weights), ctx.axis)
    found = _parameter_gradients(ctx, weights, grads, lambda: x_SBD)
    return dx.wait(), None, *found


class HiddenReduce(Function):
    """TP entry: backward all-reduces the input gradient beside the weight gradients."""

    @staticmethod
    def forward(ctx: Any, x_SBD: Tensor, axis: Axis, *tensors: Optional) -> tuple[Tensor, ...]:
        return _forward(ctx, x_SBD, lambda: x_SBD, axis, tensors)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Optional, ...]:
        return _hidden_backward(ctx, dys, start_all_reduce)


class HiddenScatter(Function):
    """SP entry: backward reduce-scatters the input gradient beside the weight gradients; the gathered input is kept."""

    @staticmethod
    def forward(ctx: Any, x_sBD: Tensor, axis: Axis, *tensors: Optional) -> tuple[Tensor, ...]:
        x_SBD = all_gather(x_sBD, axis)
        return _forward(ctx, x_SBD, lambda: x_SBD, axis, tensors)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Optional, ...]:
        return _hidden_backward(ctx, dys, start_reduce_scatter)


class Regathered(Function):
    """SP entry: keeps the shard, gathers again in the backward; every collective is waited for at once."""

    @staticmethod
    def forward(ctx: Any, x_sBD: Tensor, axis: Axis, *tensors: Optional) -> tuple[Tensor, ...]:
        return _forward(ctx, x_sBD, partial(all_gather, x_sBD, axis), axis, tensors)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Optional, ...]:
        x_sBD, weights, grads = _saved(ctx, dys)
        dx_sBD = reduce_scatter(input_gradient(grads, weights), ctx.axis)
        return dx_sBD, None, *_parameter_gradients(ctx, weights, grads, partial(all_gather, x_sBD, ctx.axis))


class HiddenRegathered(Function):
    """SP entry: keeps the shard; the second gather hides behind the input gradient, the scatter behind the weight gradients."""

    @staticmethod
    def forward(ctx: Any, x_sBD: Tensor, axis: Axis, *tensors: Optional) -> tuple[Tensor, ...]:
        return _forward(ctx, x_sBD, partial(all_gather, x_sBD, axis), axis, tensors)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Optional, ...]:
        x_sBD, weights, grads = _saved(ctx, dys)
        # Put off, the input would be kept whole until then: it is gathered when its time has come, and hides behind nothing.
        gather = partial(all_gather, x_sBD, ctx.axis) if is_putting_off() else start_all_gather(x_sBD, ctx.axis).wait
        dx_sBD = start_reduce_scatter(input_gradient(grads, weights), ctx.axis)
        found = _parameter_gradients(ctx, weights, grads, gather)
        return dx_sBD.wait(), None, *found


def _enter(entry: type[Function], x: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
    return entry.apply(x, axis, *tensors)


def columns_hidden(x_SBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """``tensor.columns`` with its backward all-reduce hidden.

    Shapes: [S, B, D] -> one [S, B, f_i] each. Cost: one all-reduce of S*B*D backward.
    """
    return _enter(HiddenReduce, x_SBD, linears, axis)


def sequence_columns_hidden(x_sBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """``sequence.columns`` with its backward reduce-scatter hidden.

    Shapes: [s, B, D] -> one [S, B, f_i] each. Cost: one all-gather forward, one reduce-scatter backward, of S*B*D.
    """
    return _enter(HiddenScatter, x_sBD, linears, axis)


def sequence_columns_regathered(x_sBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """``sequence.columns`` that keeps x_sBD instead of x_SBD.

    Shapes: [s, B, D] -> one [S, B, f_i] each. Cost: one all-gather forward; one all-gather, one reduce-scatter backward.
    """
    return _enter(Regathered, x_sBD, linears, axis)


def sequence_columns_hidden_regathered(x_sBD: Tensor, linears: Sequence[Linear], axis: Axis) -> tuple[Tensor, ...]:
    """``sequence.columns`` that keeps x_sBD, and hides both collectives of its backward.

    Shapes: [s, B, D] -> one [S, B, f_i] each. Cost: one all-gather forward; one all-gather, one reduce-scatter backward.
    """
    return _enter(HiddenRegathered, x_sBD, linears, axis)
