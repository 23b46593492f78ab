"""Which rank holds what: parameters, gradients, optimizer states, tokens and samples, of every rank of a mesh that nobody started.

Nothing is worked out here a second time. For every rank the model itself is built, without memory (torch's device "meta"), on the
mesh as that rank would see it; its layouts, its sequence map and its masters are then asked what they hold.

What is counted is what is there from one microbatch to the next. Buckets under way, a segment's gathered weights under ZeRO 3,
masters that live for an update only, activations, and the step counters of AdamW are not.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minimind_tron.cut_config import CutConfig
from minimind_tron.layers import Attention, Block, FeedForward, RMSNorm
from minimind_tron.layout import Layout, layout_of, wider
from minimind_tron.mesh import AXES, Axis, view_mesh
from minimind_tron.model import Model, Piece, build_model
from minimind_tron.parallel.zero import CutGradients, Kept
from minimind_tron.step import own_pieces

# First and last + 1, of rows or columns, heads, tokens or samples.
Range = tuple[int, int]
Extent = tuple[Range, ...]

# Moments that AdamW keeps of every master, in its dtype; see ``optim.build_adamw``.
MOMENTS = 2


@dataclass(frozen=True)
class Amount:
    """Numbers that a rank holds: those that are part of the model, the zeros they are padded with, and the bytes of both."""

    elements: int = 0
    padding: int = 0
    bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.padding + other.padding, self.bytes + other.bytes)

    def times(self, count: int) -> "Amount":
        """So many of the same."""
        return Amount(self.elements * count, self.padding * count, self.bytes * count)


@dataclass(frozen=True)
class Part:
    """A parameter on a rank, as ranges of the whole tensor.

    ``local`` is what the rank computes with; ``weight``, ``gradient`` and ``state`` are what it keeps of that under ZeRO.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    local: Extent
    weight: Extent
    gradient: Extent
    state: Extent

    @property
    def whole(self) -> bool:
        """Whether the rank computes with all of the tensor."""
        return self.local == tuple((0, size) for size in self.shape)


@dataclass(frozen=True)
class Holding:
    """What one rank holds.

    ``stage`` are the parts of the model in words, ``layers`` its decoder blocks. Ranges of heads, columns and rows are those of its
    layers, None where it has none. ``positions`` are tokens of every sample inside of attention and feed-forward, ``outside`` those
    elsewhere (fewer under SP); padding at the end of samples is left out. ``samples`` are those of the global batch.
    """

    rank: int
    coordinates: tuple[tuple[str, int], ...]
    axes: tuple[Axis, ...]
    stage: tuple[str, ...]
    layers: tuple[int, ...]
    heads: Range
    kv_heads: Range
    columns: Range
    vocab: Range | None
    positions: tuple[Range, ...]
    outside: tuple[Range, ...]
    samples: tuple[Range, ...]
    parts: tuple[Part, ...]
    parameters: Amount
    gradients: Amount
    states: Amount
    masters: Amount

    def at(self, axis: str) -> int:
        """The coordinate along an axis."""
        return dict(self.coordinates)[axis]

    @property
    def bytes(self) -> int:
        """Bytes of all that is counted."""
        return sum(amount.bytes for amount in (self.parameters, self.gradients, self.states, self.masters))


def _amount(tensor: Tensor, layout: Layout, dtype: torch.dtype) -> Amount:
    real = layout.unpadded(torch.empty(tensor.shape, device="meta")).numel()
    return Amount(real, tensor.numel() - real, tensor.numel() * dtype.itemsize)


def _runs(numbers: Iterable[int]) -> tuple[Range, ...]:
    """Ascending numbers as runs of neighbours."""
    found: list[Range] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


def _kinds(model: Model) -> dict[int, str]:
    """What every weight is for, by its identity."""
    named: dict[type, str] = {Attention: "attention", FeedForward: "feed-forward", RMSNorm: "norms"}
    # Inner modules come after outer ones, so a norm inside of attention is a norm.
    found = {id(w): kind for m in model.modules() if (kind := named.get(type(m))) for w in m.parameters()}
    for module, kind in ((model.model.embed_tokens, "embedding"), (model.lm_head, "head")):
        found |= {id(weight): kind for weight in (module.parameters() if module is not None else ())}
    return found


def _weight_of(kept: Kept, model: Model) -> tuple[Tensor, Layout]:
    """What is there of a weight between its uses."""
    return (kept.stored, layout_of(kept.master)) if model.storage.passing else (kept.weight, layout_of(kept.weight))


def _gradient_of(kept: Kept, model: Model) -> tuple[Tensor, Layout]:
    """The sum of a weight's gradients while microbatches come in: of ZeRO's shard as soon as that is what is added up."""
    held = kept.master if isinstance(model.masters, CutGradients) else kept.weight
    return held, layout_of(held)


def _part(name: str, kept: Kept, model: Model, kinds: dict[int, str]) -> Part:
    born, state = layout_of(kept.weight), layout_of(kept.master)
    weight, gradient = (of(kept, model)[1].kept_region for of in (_weight_of, _gradient_of))
    return Part(name, kinds[id(kept.weight)], born.shape, born.kept_region, weight, gradient, state.kept_region)


def _sum(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, Amount())


def _rows(weight: Tensor, unit: int = 1) -> Range:
    """Which rows of a whole matrix a rank computes with, in units of several."""
    begin, end = layout_of(weight).kept_region[0]
    return begin // unit, end // unit


def _positions(model: Model, seq_len: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    places_SB = torch.arange(seq_len)[:, None]
    inside = model.own(places_SB, -1)
    outside = model.seams.own(inside, model.seams.axis)
    return tuple(_runs(place for place in x[:, 0].tolist() if place >= 0) for x in (inside, outside))  # type: ignore[return-value]


def _samples(config: CutConfig, dp: Axis) -> tuple[Range, ...]:
    size, nothing = config.batch.micro_batch_size, torch.empty(0, dtype=torch.int64)
    pieces = own_pieces([Piece(nothing, nothing, i * size) for i in range(config.passes * dp.size)], dp)
    return _runs(number for piece in pieces for number in range(piece.first, piece.first + size))


def _stage(model: Model) -> tuple[str, ...]:
    words: list[str] = []
    for chunk in model.chunks.values():
        first, last = chunk.layers[0], chunk.layers[-1]
        words += ["embedding"] * chunk.first + [f"block {first}" if first == last else f"blocks {first}-{last}"]
        words += [f"final norm, {'tied ' * (model.lm_head is None)}head"] * chunk.last
    return tuple(words)


def holding_of(config: CutConfig, rank: int) -> Holding:
    """What a rank of the mesh would hold. Cost: some milliseconds; no memory for weights."""
    mesh = view_mesh(config.mesh, rank)
    model = build_model(config, mesh, torch.device("meta"))
    block = next(iter(model.model.layers.values()))
    assert isinstance(block, Block), "every stage holds a layer"
    ends = (model.model.embed_tokens, model.lm_head)
    vocab = next((_rows(module.weight) for module in ends if module is not None), None)
    attention, kept, kinds = block.self_attn, model.masters.kept, _kinds(model)
    positions, outside = _positions(model, config.batch.seq_len)
    sums = [(*_gradient_of(each, model), wider(each.weight.dtype)) for each in kept.values()]
    states = _sum(_amount(each.master, layout_of(each.master), each.master.dtype) for each in kept.values())
    return Holding(
        rank=mesh.rank,
        coordinates=tuple((name, getattr(mesh, name).rank) for name in AXES),
        axes=(mesh.dp, mesh.pp, mesh.cp, mesh.tp, *mesh.tp.sharers.values(), mesh.data, mesh.ends),
        stage=_stage(model),
        layers=tuple(number for chunk in model.chunks.values() for number in chunk.layers),
        heads=_rows(attention.q_proj.weight, config.model.head_width),
        kv_heads=_rows(attention.k_proj.weight, config.model.head_width),
        columns=_rows(block.mlp.gate_proj.weight),
        vocab=vocab,
        positions=positions,
        outside=outside,
        samples=_samples(config, mesh.dp),
        parts=tuple(_part(name, each, model, kinds) for name, each in kept.items()),
        parameters=_sum(_amount(*held, held[0].dtype) for each in kept.values() for held in [_weight_of(each, model)]),
        gradients=_sum(_amount(*each) for each in sums),
        states=states.times(MOMENTS),
        # Under full precision a master is the weight itself, or lives for an update only.
        masters=states if model.masters.mixed else Amount(),
    )


def holdings_of(config: CutConfig) -> tuple[Holding, ...]:
    """What every rank would hold, in their order."""
    return tuple(holding_of(config, rank) for rank in range(config.mesh.world_size))
