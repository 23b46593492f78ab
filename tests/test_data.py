"""Gradients and weights travel in buckets, as pieces; what they add up to is held in test_zero, test_validate and test_context."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from minimind_tron.layout import Cut, Layout
from minimind_tron.ledger import ledger
from minimind_tron.mesh import Axis
from minimind_tron.parallel import zero
from minimind_tron.parallel.data import Pieces, buckets
from minimind_tron.step import compute_gradients
from minimind_tron.topology import MeshConfig
from tests.meshes import make_model, mesh_of, randn, random_batch, tiny


@pytest.mark.parametrize(
    ("sizes", "largest", "expected"),
    [
        ([], 4, []),
        ([4], 4, [[4]]),
        ([5], 4, [[5]]),
        ([1, 3, 1], 4, [[1, 3], [1]]),
        ([3, 9, 1, 2, 2], 4, [[3], [9], [1, 2], [2]]),
    ],
)
def test_buckets_keep_the_order_and_split_no_weight(sizes: list[int], largest: int, expected: list[list[int]]) -> None:
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    found = list(buckets(weights, largest))
    assert [[weight.numel() for weight in bucket] for bucket in found] == expected
    assert [id(weight) for bucket in found for weight in bucket] == [id(weight) for weight in weights]


def gradients_in_buckets(largest: int) -> tuple[int, dict[str, torch.Tensor]]:
    """How many all-reduces the sums took, and what they came to."""
    with mock.patch.object(zero, "buckets", partial(buckets, largest=largest)), ledger() as entries:
        model = make_model(tiny(), mesh=mesh_of(MeshConfig(cp_size=2)))
        compute_gradients(model, random_batch(2, 8, tiny().vocab_size), 2)
    sums = [entry for entry in entries if entry.kind == "all_reduce" and entry.sent_bytes > 8]
    return len(sums), {name: gradient for name, (gradient, _) in model.masters.gradients().items()}


def test_any_bucket_gives_the_same_sums(pool) -> None:
    whole, small = (pool(2).run(gradients_in_buckets, largest)[0] for largest in (10**6, 100))
    segments = tiny().num_hidden_layers + 2
    assert whole[0] == segments < small[0]
    assert all(torch.equal(gradient, small[1][name]) for name, gradient in whole[1].items())


# Pieces


def axis_of(size: int, rank: int) -> Axis:
    return Axis("dp", size, rank, tuple(range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shapes", [((4, 3),), ((5,), (1, 7), (8, 2)), ((3, 2), (16,))], ids=str)
def test_pieces_come_back_as_they_were(size: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    packed, kept = [], []
    for rank in range(size):
        axis = axis_of(size, rank)
        layouts = [Layout(shape, shard=Cut(0, axis, size)) for shape in shapes]
        pieces = Pieces(layouts, axis)
        bucket = pieces.pack(tensors, torch.float64)
        mine = bucket.view(size, -1)[rank]
        assert mine.numel() == pieces.numbers
        kept.append([layout.kept(tensor) for layout, tensor in zip(layouts, tensors, strict=True)])
        assert all(map(torch.equal, pieces.unpack_kept(mine), kept[-1]))
        assert torch.equal(pieces.pack_kept(kept[-1], torch.float64), mine)
        packed.append(mine)
    found = [torch.empty_like(tensor) for tensor in tensors]
    pieces.unpack_into(torch.cat(packed), found)
    assert all(map(torch.equal, found, tensors))
    assert all(map(torch.equal, [torch.cat(parts) for parts in zip(*kept, strict=True)], tensors)), "each row is kept once"


def test_pieces_are_packed_in_another_dtype() -> None:
    axis = axis_of(2, 0)
    pieces = Pieces([Layout((3,), shard=Cut(0, axis, 2))], axis)
    assert pieces.pack([torch.ones(3, dtype=torch.bfloat16)], torch.float32).tolist() == [1, 1, 1, 0]
    assert pieces.pack([torch.ones(3, dtype=torch.bfloat16)], torch.float32).dtype == torch.float32
