"""Who a rank is: a named grid of ranks, given as an argument and never asked of the world."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from minimind_tron.config import divisors
from minimind_tron.topology import MeshConfig

AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh as this rank sees it; size 1 is the identity and needs no process group.

    ``rank`` is the coordinate along the axis, ``ranks`` the global ranks of the line through this rank, in coordinate order.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: "dist.ProcessGroup | None" = field(default=None, compare=False, repr=False)
    sharers: "dict[int, Axis]" = field(default_factory=dict, compare=False, repr=False)

    def sharing(self, parts: int) -> "Axis":
        """The ranks that hold the same piece when a dim is cut into fewer parts than the axis has ranks.

        Raises: AssertionError unless parts divides the size.
        """
        assert self.size % parts == 0, f"{parts} parts on an axis of {self.size}"
        if parts == self.size:
            return Axis(f"{self.name}/{parts}", ranks=(self.ranks[self.rank],))
        return self if parts == 1 else self.sharers[parts]


@dataclass(frozen=True)
class Mesh:
    """The rank grid dp x pp x cp x tp, tp innermost: neighbours in tp are neighbours in rank, and so on one host.

    ``data`` joins the ranks of dp and cp that hold the same parameters and see other tokens, dp outermost. ``ends`` joins the first
    and the last stage of a pipeline, which both hold a tied embedding; size 1 on the stages between.
    """

    dp: Axis = Axis("dp")
    pp: Axis = Axis("pp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    data: Axis = Axis("dp x cp")
    ends: Axis = Axis("pp ends")

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.tp.ranks[self.tp.rank]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(axis.size for axis in (self.dp, self.pp, self.cp, self.tp))


def rank_lines(degrees: dict[str, int], name: str) -> list[tuple[int, ...]]:
    """The global ranks of every line along one axis of a row-major grid, in coordinate order.

    Raises: KeyError for an axis the grid lacks.
    """
    strides = {axis: math.prod(list(degrees.values())[i + 1 :]) for i, axis in enumerate(degrees)}
    others = [[coordinate * strides[axis] for coordinate in range(size)] for axis, size in degrees.items() if axis != name]
    starts = [sum(offsets) for offsets in itertools.product(*others)]
    return [tuple(start + i * strides[name] for i in range(degrees[name])) for start in starts]


# Makes the process group of a line of an axis, given the axis's name and the line; asked for lines of more than one rank only.
MakeGroup = Callable[[str, tuple[int, ...]], "dist.ProcessGroup | None"]


def _axis_of(rank: int, name: str, lines: list[tuple[int, ...]], make_group: MakeGroup) -> Axis:
    """Make a group for every line, and give this rank the axis of its own; all ranks make all groups, in one order."""
    mine = None
    for line in lines:
        group = make_group(name, line) if len(line) > 1 else None
        if rank in line:
            mine = Axis(name, len(line), line.index(rank), line, group)
    assert mine is not None, f"rank {rank} is on no line of {name}"
    return mine


def _ends_of(rank: int, pp: Axis, lines: list[tuple[int, ...]], make_group: MakeGroup) -> Axis:
    """The axis of the first and the last stage of every pipeline; with two stages their group is that of the pipeline."""
    if pp.size <= 2:
        return Axis("pp ends", pp.size, pp.rank, pp.ranks, pp.group)
    alone: list[tuple[int, ...]] = [(between,) for line in lines for between in line[1:-1]]
    return _axis_of(rank, "pp ends", [*((line[0], line[-1]) for line in lines), *alone], make_group)


def data_lines(degrees: dict[str, int]) -> list[tuple[int, ...]]:
    """The global ranks of every plane of dp and cp, in the order of dp first."""
    outer, inner = rank_lines(degrees, "dp"), {line[0]: line for line in rank_lines(degrees, "cp")}
    return [tuple(rank for start in line for rank in inner[start]) for line in outer if line[0] in inner]


def _data_of(rank: int, axes: dict[str, Axis], degrees: dict[str, int], make_group: MakeGroup) -> Axis:
    """The axis over dp and cp; where one of them has a single rank, the other one is it, group and all."""
    for name, other in (("dp", "cp"), ("cp", "dp")):
        if degrees[name] == 1:
            return axes[other]
    return _axis_of(rank, "dp x cp", data_lines(degrees), make_group)


def _construct(config: MeshConfig, rank: int, make_group: MakeGroup) -> Mesh:
    """The mesh as a rank sees it; whatever makes, records or leaves out process groups comes through here."""
    if config.world_size == 1:
        return Mesh()
    axes = {name: _axis_of(rank, name, rank_lines(config.degrees, name), make_group) for name in AXES}
    tp = axes["tp"]
    for parts in divisors(tp.size)[1:-1]:
        share = tp.size // parts
        pieces = [line[i : i + share] for line in rank_lines(config.degrees, "tp") for i in range(0, tp.size, share)]
        tp.sharers[parts] = _axis_of(rank, f"tp/{parts}", pieces, make_group)
    data = _data_of(rank, axes, config.degrees, make_group)
    return Mesh(**axes, data=data, ends=_ends_of(rank, axes["pp"], rank_lines(config.degrees, "pp"), make_group))


def build_mesh(config: MeshConfig, rank: int, world_size: int, timeout_s: float | None = None) -> Mesh:
    """The mesh of a running job; ``timeout_s`` is how long a rank waits for another, torch's half an hour unless given.

    Cost: one process group for every line of every axis longer than 1, for every plane of dp and cp where both are, and for the
    divisors of tp that kv heads may need; see ``groups_in_order``.
    Raises: TronError when the degrees do not multiply to the world size.
    """
    config.check_world(world_size)
    # A new group does not inherit the timeout of the default one.
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return _construct(config, rank, lambda _, line: dist.new_group(list(line), timeout=timeout))


def view_mesh(config: MeshConfig, rank: int) -> Mesh:
    """The mesh as a rank of a job would see it, without the job: axes as in ``build_mesh``, and no process group."""
    return _construct(config, rank, lambda name, line: None)


def groups_in_order(config: MeshConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Every process group of a job, as its axis and its ranks, in the order in which all ranks make them."""
    made: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, line: tuple[int, ...]) -> None:
        made.append((name, line))

    # All ranks make all groups, so any rank would do.
    _construct(config, 0, record)
    return made
