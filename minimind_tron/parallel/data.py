"""Gradient sums, read off the layouts.

A gradient is summed over every axis whose ranks share the weight but did only a part of the work with it: norms and row biases
under SP, q/k norms and shared kv heads under TP, whole embeddings under SP, everything under CP. Where that is so is written on
the parameter when it is born; this file only reads it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from minimind_tron.collectives import sum_over
from minimind_tron.layout import layout_of, wider
from minimind_tron.mesh import Axis

# 64 MiB in float32: large enough that a collective's latency does not count, small beside a model.
BUCKET_NUMBERS = 2**24


def partial_gradients(weights: Iterable[nn.Parameter]) -> dict[tuple[Axis, ...], list[nn.Parameter]]:
    """The parameters whose gradients are parts, by the axes they are parts over; in the order given, alike on every rank."""
    by_axes: dict[tuple[Axis, ...], list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        if layout_of(weight).partial:
            by_axes[layout_of(weight).partial].append(weight)
    return by_axes


def buckets(weights: Iterable[nn.Parameter], largest: int = BUCKET_NUMBERS) -> Iterator[list[nn.Parameter]]:
    """The weights in runs of at most so many numbers, or of one weight that has more."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for weight in weights:
        if bucket and filled + weight.numel() > largest:
            yield bucket
            bucket, filled = [], 0
        bucket.append(weight)
        filled += weight.numel()
    if bucket:
        yield bucket


def _flat(gradients: list[Tensor]) -> Tensor:
    """One buffer in the wider of float32 and the gradients' dtype: long sums are not made in bfloat16."""
    dtype = wider(gradients[0].dtype)
    return torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])


@torch.no_grad()
def sum_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Replace every gradient that is a part by the sum of the parts; runs once, after the last backward of a step.

    A parameter that had no work on this rank counts as zeros, since the other ranks wait for its part.
    Cost: an all-reduce of every such gradient over each of its axes, in float32 or wider; gradients of the same axes travel
    together, in buckets, so that no second copy of all of them is made.
    """
    for axes, group in partial_gradients(weights).items():
        for bucket in buckets(group):
            _sum_bucket(bucket, axes)


def _sum_bucket(bucket: list[nn.Parameter], axes: tuple[Axis, ...]) -> None:
    for weight in bucket:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in bucket if weight.grad is not None]
    summed = sum_over(_flat(gradients), axes)
    for gradient, piece in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))
