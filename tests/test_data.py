"""Gradient sums travel in buckets; what they add up to is held in test_ledger, test_validate and test_context."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from minimind_tron.ledger import ledger
from minimind_tron.parallel import data
from minimind_tron.parallel.data import buckets, sum_gradients
from minimind_tron.step import compute_gradients
from minimind_tron.topology import MeshConfig
from tests.meshes import make_model, mesh_of, random_batch, tiny


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
    model = make_model(tiny(), mesh=mesh_of(MeshConfig(cp_size=2)))
    with mock.patch("minimind_tron.step.sum_gradients"):
        compute_gradients(model, random_batch(2, 8, tiny().vocab_size), 2)
    with mock.patch.object(data, "buckets", partial(buckets, largest=largest)), ledger() as entries:
        sum_gradients(model.parameters())
    return len(entries), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_any_bucket_gives_the_same_sums(pool) -> None:
    whole, small = (pool(2).run(gradients_in_buckets, largest)[0] for largest in (10**6, 100))
    assert whole[0] == 1 < small[0]
    assert all(torch.equal(gradient, small[1][name]) for name, gradient in whole[1].items())
