"""The rank grid against numpy's, and the groups that a job makes of it."""

import itertools
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from minimind_tron.collectives import all_reduce
from minimind_tron.errors import TronError
from minimind_tron.mesh import AXES, Axis, Mesh, build_mesh, rank_lines
from minimind_tron.topology import MeshConfig
from tests.meshes import SIZES, lonely, tp_mesh

GRIDS = [dict(zip("abcd", sizes, strict=False)) for n in (1, 2, 3, 4) for sizes in itertools.product((1, 2, 3), repeat=n)]


def test_rank_lines_are_numpys() -> None:
    for degrees in GRIDS:
        grid = np.arange(math.prod(degrees.values())).reshape(tuple(degrees.values()))
        for i, name in enumerate(degrees):
            want = np.moveaxis(grid, i, -1).reshape(-1, degrees[name]).tolist()
            assert [list(line) for line in rank_lines(degrees, name)] == want, (degrees, name)


def test_every_rank_is_on_one_line_of_each_axis() -> None:
    for degrees in GRIDS:
        for name in degrees:
            ranks = [rank for line in rank_lines(degrees, name) for rank in line]
            assert sorted(ranks) == list(range(math.prod(degrees.values())))


def test_rank_lines_of_an_unknown_axis() -> None:
    with pytest.raises(KeyError):
        rank_lines({"dp": 2}, "tp")


def test_tp_is_innermost() -> None:
    assert AXES[-1] == "tp"
    assert tuple(MeshConfig(tp_size=4).degrees) == AXES
    assert rank_lines({"dp": 2, "pp": 1, "cp": 1, "tp": 4}, "tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_the_mesh_of_one_rank() -> None:
    mesh = build_mesh(MeshConfig(), 0, 1)
    assert mesh == Mesh()
    assert (mesh.rank, mesh.size, mesh.tp.group, mesh.tp.sharers) == (0, 1, None, {})
    assert mesh.tp.sharing(1).size == 1


def test_sharing() -> None:
    axis = lonely(4, 2)
    assert axis.sharing(1) is axis
    alone = axis.sharing(4)
    assert (alone.name, alone.size, alone.rank, alone.ranks, alone.group) == ("tp/4", 1, 0, (2,), None)
    with pytest.raises(AssertionError, match="3 parts on an axis of 4"):
        axis.sharing(3)
    with pytest.raises(KeyError):
        axis.sharing(2)


@pytest.mark.parametrize(("tp", "world"), [(2, 3), (4, 2), (1, 2), (8, 1)])
def test_a_mismatch_names_degrees_product_and_a_valid_choice(tp: int, world: int) -> None:
    with pytest.raises(TronError) as error:
        build_mesh(MeshConfig(tp_size=tp), 0, world)
    assert (
        error.value.what
        == f"the launcher started {world} rank{'s' * (world != 1)}, but the mesh dp 1 x pp 1 x cp 1 x tp {tp} has {tp}"
    )
    assert error.value.fix == f"use --tp-size {world}, or start {tp} rank{'s' * (tp != 1)}"
    MeshConfig(tp_size=world).check_world(world)


def describe() -> dict[str, object]:
    mesh = tp_mesh()
    here = torch.tensor([1.0, mesh.rank])
    sums = {parts: all_reduce(here, mesh.tp.sharing(parts)).tolist() for parts in (1, 2, 4) if mesh.tp.size % parts == 0}
    return {
        "mesh": mesh.rank,
        "size": mesh.size,
        "tp": (mesh.tp.name, mesh.tp.size, mesh.tp.rank, mesh.tp.ranks),
        "others": [(axis.size, axis.rank, axis.ranks, axis.group) for axis in (mesh.dp, mesh.pp, mesh.cp)],
        "sharers": {parts: (axis.name, axis.rank, axis.ranks) for parts, axis in mesh.tp.sharers.items()},
        "sums": sums,
    }


@pytest.mark.parametrize("size", SIZES)
def test_build_mesh(pool, size: int) -> None:
    for rank, found in enumerate(pool(size).run(describe)):
        assert (found["mesh"], found["size"]) == (rank, size)
        assert found["tp"] == ("tp", size, rank, tuple(range(size)))
        expected = (1, 0, (rank,), None)
        assert found["others"] == [expected] * 3
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found["sharers"] == ({2: ("tp/2", rank % 2, pair)} if size == 4 else {})
        for parts, total in found["sums"].items():
            share = size // parts
            first = rank // share * share
            assert total == [share, sum(range(first, first + share))]


def test_axes_compare_by_place_not_by_group() -> None:
    assert Axis("tp", 2, 0, (0, 1)) == lonely(2, 0) != lonely(2, 1)
    assert hash(Axis("tp", 2, 0, (0, 1))) == hash(lonely(2, 0))


def group_timeouts() -> list[timedelta]:
    """Of every group this rank makes; validate's other ranks wait for hours while rank 0 runs the dense model."""
    mesh = build_mesh(MeshConfig(tp_size=4), dist.get_rank(), 4, timeout_s=7000.0)
    groups = [mesh.tp.group, mesh.tp.sharing(2).group]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group]


def test_every_group_waits_as_long_as_it_is_told(pool) -> None:
    for timeouts in pool(4).run(group_timeouts):
        assert timeouts == [timedelta(seconds=7000)] * 2
