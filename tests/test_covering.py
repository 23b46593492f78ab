"""The pairwise cover covers, and is small."""

import itertools

from tests.covering import pairwise

VALUES = {"a": (1, 2, 3), "b": (False, True), "c": ("x", "y", "z"), "d": (0, 1)}


def test_every_pair_of_values_occurs() -> None:
    rows = pairwise(VALUES)
    for (a, a_values), (b, b_values) in itertools.combinations(VALUES.items(), 2):
        for pair in itertools.product(a_values, b_values):
            assert any((row[a], row[b]) == pair for row in rows), f"{a}, {b} = {pair}"


def test_the_cover_is_far_smaller_than_the_product() -> None:
    assert 9 <= len(pairwise(VALUES)) <= 14 < 36
