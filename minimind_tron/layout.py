"""What a tensor is to the whole: how it is cut, what its gradient is a part of, and how it is drawn."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from minimind_tron.mesh import Axis


@dataclass(frozen=True)
class Cut:
    """One dim cut over one axis into equal pieces, the last ones padded with zeros where the dim does not divide.

    With fewer parts than ranks, consecutive ranks hold the same piece.
    """

    dim: int
    axis: Axis
    parts: int

    @property
    def piece(self) -> int:
        """Which piece this rank holds."""
        return self.axis.rank * self.parts // self.axis.size

    def rows(self, whole: int, piece: int) -> tuple[int, int]:
        """Begin and end, in the whole dim, of a piece's real (not padded) rows."""
        size = self.padded_piece(whole)
        return min(piece * size, whole), min((piece + 1) * size, whole)

    def padded_piece(self, whole: int) -> int:
        """Rows of a piece, padding included."""
        return -(-whole // self.parts)


Fill = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Layout:
    """What a parameter is to the whole tensor it belongs to.

    ``shape`` is the logical shape without padding. ``partial`` are the axes whose ranks share the weight but each did only a
    part of the work with it, so that gradients must be summed over them. ``shard`` cuts dim 0 of the local tensor once more, into
    pieces that are not padded and may be empty: what ZeRO leaves of it on a rank.
    """

    shape: tuple[int, ...]
    fill: Fill = "normal"
    cut: Cut | None = None
    partial: tuple[Axis, ...] = ()
    shard: Cut | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor before ZeRO cuts it, padding included."""
        shape = list(self.shape)
        if self.cut:
            shape[self.cut.dim] = self.cut.padded_piece(shape[self.cut.dim])
        return tuple(shape)

    @property
    def rows(self) -> tuple[int, int]:
        """Begin and end, in dim 0 of the local tensor, of what this rank keeps of it."""
        whole = self.local_shape[0]
        return self.shard.rows(whole, self.shard.piece) if self.shard else (0, whole)

    def kept(self, local: Tensor) -> Tensor:
        """What this rank keeps of its local tensor, as a view."""
        begin, end = self.rows
        return local.narrow(0, begin, end - begin)

    @property
    def region(self) -> tuple[slice, ...]:
        """This rank's part of the whole tensor, as slices."""
        region = [slice(0, size) for size in self.shape]
        if self.cut:
            region[self.cut.dim] = slice(*self.cut.rows(self.shape[self.cut.dim], self.cut.piece))
        return tuple(region)

    @property
    def kept_region(self) -> tuple[tuple[int, int], ...]:
        """Begin and end, in every dim of the whole tensor, of the real elements that this rank keeps."""
        (first, *others), (begin, end) = self.region, self.rows
        real = tuple(min(first.start + row, first.stop) for row in (begin, end))
        return ((real[0], real[1]), *((part.start, part.stop) for part in others))

    def unpadded(self, kept: Tensor) -> Tensor:
        """The real elements of what this rank keeps, as a view."""
        begin, end = self.rows
        for dim, part in enumerate(self.region):
            real = part.stop - part.start
            kept = kept.narrow(dim, 0, max(0, min(real, end) - begin) if dim == 0 else real)
        return kept

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the tensors of all ranks of the cut axis, in coordinate order; copies beyond the first unused."""
        if not self.cut:
            return locals_[0]
        copies, whole = self.cut.axis.size // self.cut.parts, self.shape[self.cut.dim]
        pieces = []
        for piece in range(self.cut.parts):
            begin, end = self.cut.rows(whole, piece)
            pieces.append(locals_[piece * copies].narrow(self.cut.dim, 0, end - begin))
        return torch.cat(pieces, self.cut.dim)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The wider of float32 and a dtype: what long sums, statistics and angles are computed in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Storage:
    """Where parameters live, and as what.

    ``data_axes`` are the axes whose ranks each hold every parameter and see other tokens, so that all gradients are parts. With
    ``passing``, parameters take memory only while they are used: whoever stores them elsewhere makes room and frees it.
    """

    dtype: torch.dtype
    device: torch.device
    data_axes: tuple[Axis, ...] = ()
    passing: bool = False

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of zeros, stored so."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class LaidOut(nn.Parameter):
    """A parameter that carries its layout (``Tensor.layout`` is taken: torch means strided or sparse by it)."""

    whole: Layout


def parameter(layout: Layout, storage: Storage) -> LaidOut:
    """A parameter born with its layout; its values are undefined until it is filled."""
    born = LaidOut(torch.empty(layout.local_shape, dtype=storage.dtype, device=storage.device))
    born.whole = replace(layout, partial=layout.partial + storage.data_axes)
    if storage.passing:
        free(born)
    return born


def free(x: Tensor) -> None:
    """Give a tensor's memory back; its shape stays, and so do its places in graphs, which find it filled again when they ask."""
    x.untyped_storage().resize_(0)


def make_room(x: Tensor) -> None:
    """Give a freed tensor memory again; its values are undefined."""
    x.untyped_storage().resize_(x.numel() * x.element_size())


def layout_of(weight: Tensor) -> Layout:
    """The layout a parameter was born with."""
    return cast(LaidOut, weight).whole


def live(*axes: Axis) -> tuple[Axis, ...]:
    """The axes that have more than one rank."""
    return tuple(axis for axis in axes if axis.size > 1)


INITIAL_STD = 0.02


def draw(name: str, layout: Layout, seed: int, spread: float = 0.0) -> Tensor:
    """The whole tensor at step 0, in float32: it depends on the name and the seed only.

    ``spread`` is the standard deviation around ones and zeros; a checker sets it, since a norm of ones and a bias of zeros hide
    what is done to them.
    Cost: the whole tensor is drawn on every rank, one tensor at a time.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    noise = torch.randn(layout.shape, generator=generator)
    if layout.fill == "normal":
        return noise.mul_(INITIAL_STD)
    return noise.mul_(spread).add_(1.0 if layout.fill == "ones" else 0.0)


@torch.no_grad()
def fill_from(local: Tensor, layout: Layout, whole_region: Tensor) -> None:
    """Write this rank's region of a whole tensor into its local tensor, and zeros into the padding.

    Shapes: whole_region has the shape of ``layout.region``.
    """
    local.zero_()
    layout.unpadded(local).copy_(whole_region)
