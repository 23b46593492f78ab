"""Every collective against what a rank would compute that knew the tensors of all, and the ledger's rules of use."""

import gc
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from minimind_tron import collectives
from minimind_tron.collectives import (
    all_gather,
    all_reduce,
    exchange_parts,
    gather_copies,
    gather_whole,
    reduce_scatter,
    shard,
    share,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_shift,
    sum_over,
)
from minimind_tron.layout import Cut, Layout, fill_from
from minimind_tron.ledger import ledger
from minimind_tron.mesh import Axis, Mesh
from tests.meshes import SIZES, lonely, tp_mesh

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
FLAT = [("_gather_flat", "all_gather_single"), ("_gather_flat", "all_gather_into_tensor")]
FLAT += [("_scatter_flat", "reduce_scatter_single"), ("_scatter_flat", "reduce_scatter_tensor")]
# What each collective makes of everybody's tensors, on one rank.
ORACLES = {
    "all_reduce": (all_reduce, lambda xs, rank: torch.stack(xs).sum(0)),
    "all_reduce max": (lambda x, axis: all_reduce(x, axis, "max"), lambda xs, rank: torch.stack(xs).amax(0)),
    "all_gather": (all_gather, lambda xs, rank: torch.cat(xs)),
    "reduce_scatter": (reduce_scatter, lambda xs, rank: torch.stack(xs).sum(0).chunk(len(xs))[rank]),
    "shift": (lambda x, axis: start_shift(x, axis).wait(), lambda xs, rank: xs[rank - 1]),
    "exchange_parts": (exchange_parts, lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs])),
    "gather_copies": (lambda x, axis: torch.stack(gather_copies(x, axis)), lambda xs, rank: torch.stack(xs)),
    "sum_over": (lambda x, axis: sum_over(x, (Axis("dp"), axis)), lambda xs, rank: torch.stack(xs).sum(0)),
}


def arranged(dense: Tensor, arrangement: str) -> Tensor:
    """The same values, laid out in memory in another way."""
    if arrangement == "transposed":
        return dense.transpose(0, 2).contiguous().transpose(0, 2)
    if arrangement == "strided":
        return dense.repeat_interleave(2, 0)[::2]
    return torch.cat((dense, dense)).narrow(0, 0, dense.shape[0]) if arrangement == "front of a longer one" else dense


def inputs(size: int, dtype: torch.dtype, arrangement: str, seed: int = 0) -> list[Tensor]:
    """Every rank's tensor; whole numbers, so that no dtype and no order of summation rounds."""
    draws = [torch.randint(-9, 9, (8, 3, 2), generator=torch.Generator().manual_seed(seed + rank)) for rank in range(size)]
    return [arranged(draw.to(dtype), arrangement) for draw in draws]


def check_collective(name: str, dtype: torch.dtype, arrangement: str) -> None:
    axis = tp_mesh().tp
    run, oracle = ORACLES[name]
    xs = inputs(axis.size, dtype, arrangement)
    x = xs[axis.rank]
    before = x.clone()
    y = run(x, axis)
    assert torch.equal(y, oracle(xs, axis.rank))
    assert y.dtype == dtype
    assert torch.equal(x, before), "wrote into its input"
    if axis.size > 1:
        y.fill_(77)
        assert torch.equal(x, before), "the result shares memory with the input"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ORACLES)
def test_collective(pool, name: str, size: int) -> None:
    pool(size).run(check_collective_every_way, name)


def check_collective_every_way(name: str) -> None:
    for dtype in DTYPES:
        for arrangement in ("plain", "transposed", "strided", "front of a longer one"):
            check_collective(name, dtype, arrangement)


def check_flat_name(attribute: str, name: str) -> None:
    kept = getattr(collectives, attribute)
    setattr(collectives, attribute, getattr(dist, name))
    try:
        check_collective_every_way("all_gather" if attribute == "_gather_flat" else "reduce_scatter")
    finally:
        setattr(collectives, attribute, kept)


@pytest.mark.parametrize(("attribute", "name"), FLAT)
def test_both_names_of_the_flat_collectives(pool, attribute: str, name: str) -> None:
    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")
    pool(2).run(check_flat_name, attribute, name)


@pytest.mark.parametrize(("attribute", "new", "old"), [(*FLAT[0], FLAT[1][1]), (*FLAT[2], FLAT[3][1])])
def test_old_names_are_used_where_the_new_are_missing(monkeypatch, attribute: str, new: str, old: str) -> None:
    if not hasattr(dist, old):
        pytest.skip(f"this torch has no {old}")
    assert getattr(collectives, attribute) is getattr(dist, new if hasattr(dist, new) else old)
    monkeypatch.delattr(dist, new, raising=False)
    spec = importlib.util.spec_from_file_location("collectives_of_an_older_torch", collectives.__file__)
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    assert getattr(older, attribute) is getattr(dist, old)


def test_an_axis_of_one_is_the_identity_without_a_group() -> None:
    assert not dist.is_initialized()
    x = torch.randn(3, 2)
    for run in (all_reduce, all_gather, reduce_scatter, exchange_parts):
        assert run(x, Mesh().tp) is x
    assert start_shift(x, Mesh().tp).wait() is x
    assert torch.equal(shard(x, Mesh().tp), x)
    assert share(thing := {"a": 1}, Mesh()) is thing
    assert sum_over(x, (Mesh().dp, Mesh().tp)) is x
    (copy,) = gather_copies(x, Mesh().tp)
    assert torch.equal(copy, x)


def test_shard_is_a_view() -> None:
    x = torch.arange(8)
    assert [shard(x, lonely(4, rank)).tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    shard(x, lonely(4, 3))[0] = 99
    assert x[6] == 99


def test_reduce_scatter_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(AssertionError, match=r"dim 0 of \(3, 2\) is not a multiple of 2"):
        reduce_scatter(torch.ones(3, 2), lonely(2, 0))


def check_in_flight() -> None:
    axis = tp_mesh().tp
    xs, ys = inputs(axis.size, torch.float64, "plain"), inputs(axis.size, torch.float64, "transposed", seed=50)
    summed = start_all_reduce(xs[axis.rank].clone(), axis)
    gathered = start_all_gather(ys[axis.rank].clone(), axis)
    scattered = start_reduce_scatter(ys[axis.rank].clone(), axis)
    shifted = start_shift(xs[axis.rank].clone(), axis)
    # Nothing but the handles refers to the inputs now; what is allocated next must not land in their place.
    gc.collect()
    noise = [torch.full((8, 3, 2), torch.nan, dtype=torch.float64) for _ in range(50)]
    assert torch.equal(scattered.wait(), torch.stack(ys).sum(0).chunk(axis.size)[axis.rank])
    assert torch.equal(gathered.wait(), torch.cat(ys))
    assert torch.equal(summed.wait(), torch.stack(xs).sum(0))
    assert torch.equal(shifted.wait(), xs[axis.rank - 1])
    assert len(noise) == 50
    # An all-reduce reads a copy, so the input may change at once.
    x = xs[axis.rank].clone()
    pending = start_all_reduce(x, axis)
    x.fill_(torch.nan) if axis.size > 1 else None
    assert torch.equal(pending.wait(), torch.stack(xs).sum(0))


@pytest.mark.parametrize("size", SIZES)
def test_several_in_flight(pool, size: int) -> None:
    pool(size).run(check_in_flight)


def check_nothing_is_kept() -> list[bool]:
    """Whether what was sent is gone once the result is here, although the handles are not."""
    axis, gone = tp_mesh().tp, []
    for start in (start_all_reduce, start_all_gather, start_reduce_scatter, start_shift):
        x = inputs(axis.size, torch.float64, "plain")[axis.rank]
        sent, pending = StorageWeakRef(x.untyped_storage()), start(x, axis)
        del x
        pending.wait()
        # A thread of the backend may hold its finished work a moment longer.
        end = time.monotonic() + 5
        while not sent.expired() and time.monotonic() < end:
            time.sleep(0.01)
        gone.append(sent.expired())
        with pytest.raises(AssertionError, match="taken already"):
            pending.wait()
    return gone


def test_what_was_sent_is_kept_by_nobody(pool) -> None:
    assert pool(2).run(check_nothing_is_kept) == [[True] * 4] * 2


def what_is_booked(dtype: torch.dtype) -> list[tuple[str, str, int, bool, bool]]:
    """The ledger's entries of a shift and of an exchange of 8 x 3 x 2 numbers."""
    axis = tp_mesh().tp
    x = inputs(axis.size, dtype, "plain")[axis.rank]
    with ledger() as entries:
        start_shift(x, axis).wait()
        exchange_parts(x, axis)
    return [(entry.axis, entry.kind, entry.sent_bytes, entry.backward, 0 < entry.start_s <= entry.end_s) for entry in entries]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_shift_sends_all_and_an_exchange_what_is_not_its_own(pool, size: int, dtype: torch.dtype) -> None:
    whole = 48 * dtype.itemsize
    entries = [("tp", "shift", whole, False, True), ("tp", "all_to_all", whole * (size - 1) // size, False, True)]
    assert pool(size).run(what_is_booked, dtype) == [entries if size > 1 else []] * size


def check_share() -> object:
    mesh = tp_mesh()
    return share({"from": mesh.rank, "tensor": torch.full((2,), float(mesh.rank))}, mesh)


@pytest.mark.parametrize("size", SIZES)
def test_share_is_what_rank_0_has(pool, size: int) -> None:
    for shared in pool(size).run(check_share):
        assert shared["from"] == 0
        assert shared["tensor"].tolist() == [0, 0]


def check_gather_whole() -> None:
    axis = tp_mesh().tp
    for shape, dim, parts in (((9, 2), 0, axis.size), ((2, 3), 1, axis.size), ((6,), 0, max(1, axis.size // 2)), ((5, 2), 0, 1)):
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        layout = Layout(shape, cut=Cut(dim, axis, parts))
        local = torch.empty(layout.local_shape)
        fill_from(local, layout, whole[layout.region])
        assert torch.equal(gather_whole(local, layout), whole)
    assert torch.equal(gather_whole(whole, Layout(shape)), whole)


@pytest.mark.parametrize("size", SIZES)
def test_gather_whole(pool, size: int) -> None:
    pool(size).run(check_gather_whole)


def refusing_strides(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective as nccl's is: gloo in this torch lays out what it is given by itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        assert all(arg.is_contiguous() for arg in args if isinstance(arg, Tensor)), "a tensor with strides on the wire"
        return collective(*args, **kwargs)

    return run


def check_what_is_sent() -> None:
    axis = tp_mesh().tp
    x = inputs(axis.size, torch.float64, "transposed")[axis.rank]
    assert not x.is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
        names = ((collectives, "_gather_flat"), (collectives, "_scatter_flat"), (dist, "all_reduce"), (dist, "all_to_all_single"))
        for owner, name in names:
            patch.setattr(owner, name, refusing_strides(getattr(owner, name)))
        for run in (all_gather, reduce_scatter, all_reduce, exchange_parts):
            run(x, axis)


def test_what_is_sent_is_contiguous(pool) -> None:
    pool(2).run(check_what_is_sent)


def check_empty() -> None:
    axis = tp_mesh().tp
    for run in (all_reduce, all_gather, reduce_scatter):
        assert run(torch.ones(0, 3), axis).shape == (0, 3)


def test_empty_tensors(pool) -> None:
    pool(2).run(check_empty)
