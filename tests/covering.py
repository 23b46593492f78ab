"""A small set of configurations in which every pair of values of any two settings occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def _pairs(row: Row) -> set[tuple[Any, ...]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def pairwise(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows that cover every pair, greedily: each next row is the one, of the whole product, with most pairs not seen yet.

    Source: Cohen et al., The AETG System, IEEE TSE 23(7), 1997; there candidates are sampled, here the whole product is tried.
    """
    product = [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]
    todo = set().union(*map(_pairs, product))
    rows = []
    while todo:
        best = max(product, key=lambda row: len(_pairs(row) & todo))
        rows.append(best)
        todo -= _pairs(best)
    return rows
