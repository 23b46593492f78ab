"""Data parallelism (DP): each rank takes its own samples, and gradients are summed; how tensors travel together, in buckets.

Batch t is cut over dp by index, as a sample is cut over cp by position. So both axes do the same to a parameter: their ranks share
it and each sees other tokens. They are one axis here, ``mesh.data``, and every gradient is a part over it.

Which other axes a gradient is a part over is written on the parameter when it is born: norms and row biases under SP, q/k norms and
shared kv heads under TP, whole embeddings under SP, a tied matrix over the ends of a pipeline. This file only reads it.

A bucket holds, for each of its tensors, the piece of every rank, padded to one size: [n, numbers], so that reduce-scatter and
all-gather move whole buckets. ``zero.py`` says which of them run, and when.

Cost: an all-reduce of N numbers sends 2 (n-1)/n N, a reduce-scatter or all-gather (n-1)/n N', where N' counts the padding of
pieces: n * ceil(rows / n) rows of each local tensor. Sums travel and are made in the wider of float32 and the dtype.
Source: Li et al., PyTorch Distributed, arXiv 2006.15704, for buckets; there they are filled across layers by size, here by layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minimind_tron.collectives import sum_over
from minimind_tron.layout import Layout
from minimind_tron.mesh import Axis

T = TypeVar("T", bound=Tensor)

# 64 MiB in float32: large enough that a collective's latency does not count, small beside a model.
BUCKET_NUMBERS = 2**24


def buckets(tensors: Iterable[T], largest: int = BUCKET_NUMBERS) -> Iterator[list[T]]:
    """The tensors in runs of at most so many numbers, or of one tensor that has more."""
    bucket: list[T] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > largest:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket


def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors one after the other, in one buffer."""
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def split(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a flat buffer, as views."""
    pieces = buffer.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


class Pieces:
    """How tensors whose dim 0 is cut over an axis lie in a bucket: a part for each rank, with a padded piece of every tensor."""

    def __init__(self, layouts: Sequence[Layout], axis: Axis) -> None:
        self.axis = axis
        # Dim 0 of the local tensor, numbers in a row, rows of a padded piece; and what this rank keeps.
        self.shapes = [layout.local_shape for layout in layouts]
        self.rows = [-(-shape[0] // axis.size) for shape in self.shapes]
        self.widths = [torch.Size(shape[1:]).numel() for shape in self.shapes]
        self.kept = [layout.rows[1] - layout.rows[0] for layout in layouts]

    @property
    def numbers(self) -> int:
        """What a rank's part holds."""
        return sum(rows * width for rows, width in zip(self.rows, self.widths, strict=True))

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Whole local tensors as a bucket. Shapes: -> [n * numbers]."""
        n, parts = self.axis.size, []
        for tensor, rows in zip(tensors, self.rows, strict=True):
            matrix = tensor.reshape(tensor.shape[0], -1).to(dtype)
            parts.append(F.pad(matrix, (0, 0, 0, n * rows - tensor.shape[0])).view(n, -1))
        return torch.cat(parts, 1).view(-1)

    def pack_kept(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's part of a bucket from what it keeps. Shapes: -> [numbers]."""
        parts = []
        for tensor, rows, width in zip(tensors, self.rows, self.widths, strict=True):
            matrix = tensor.reshape(tensor.shape[0], width).to(dtype)
            parts.append(F.pad(matrix, (0, 0, 0, rows - tensor.shape[0])).view(-1))
        return torch.cat(parts)

    def unpack_kept(self, part: Tensor) -> list[Tensor]:
        """What this rank keeps, as views of its part of a bucket."""
        found = []
        pieces = part.split([rows * width for rows, width in zip(self.rows, self.widths, strict=True)])
        for piece, kept, width, shape in zip(pieces, self.kept, self.widths, self.shapes, strict=True):
            found.append(piece[: kept * width].view(kept, *shape[1:]))
        return found

    def unpack_into(self, bucket: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write a bucket into whole local tensors. Shapes: [n * numbers] ->."""
        n = self.axis.size
        columns = bucket.view(n, -1).split([rows * width for rows, width in zip(self.rows, self.widths, strict=True)], 1)
        for tensor, column, rows, width in zip(tensors, columns, self.rows, self.widths, strict=True):
            # Pieces are full up to one, and empty after it.
            full = tensor.shape[0] // rows
            matrix = tensor.view(tensor.shape[0], width)
            matrix[: full * rows].view(full, rows * width).copy_(column[:full])
            rest = tensor.shape[0] - full * rows
            if rest:
                matrix[full * rows :].copy_(column[full, : rest * width].view(rest, width))


def sum_partial(gradients: Sequence[tuple[Tensor, tuple[Axis, ...]]]) -> None:
    """Replace gradients, in place, by their sums over the axes each is a part over.

    Every rank of those axes gives the same ones in the same order.
    Cost: an all-reduce of every such gradient over each of its axes, in its dtype; gradients of the same axes travel together.
    """
    by_axes: dict[tuple[Axis, ...], list[Tensor]] = defaultdict(list)
    for gradient, axes in gradients:
        if axes:
            by_axes[axes].append(gradient)
    for axes, group in by_axes.items():
        for bucket in buckets(group):
            summed = sum_over(flat(bucket, bucket[0].dtype), axes)
            for gradient, piece in zip(bucket, split(summed, bucket), strict=True):
                gradient.copy_(piece)
