"""What each stage of ZeRO keeps and sends, held against the closed forms of its docstring, and sums that are long."""

import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from measurements.storages import Storages
from minimind_tron.collectives import gather_whole
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.layout import layout_of
from minimind_tron.ledger import Entry, ledger
from minimind_tron.model import Model, Piece, build_model
from minimind_tron.optim import build_adamw
from minimind_tron.parallel import zero as zeros
from minimind_tron.parallel.segments import Segment
from minimind_tron.parallel.zero import Masters
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import compute_gradients, evaluate, run_pipeline, train_step
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.covering import Row
from tests.meshes import mesh_of, random_batch
from tests.proving import Pools, one_thread
from tests.zero_cases import CPU, OTHERS, STAGES, build, config_of

# Memory


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each once, as they are now."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def gradients_of(weights: Iterable[Tensor]) -> int:
    return bytes_of(weight.grad for weight in weights if weight.grad is not None)


@dataclass
class Held:
    """Bytes of a rank: kept from step to step, and the most there was of what is there for a while only."""

    parameters: int
    gradients: int
    states: int
    everything: int  # that is allocated and still there between backward and update
    block_weights: int = 0
    coming_weights: int = 0
    block_gradients: int = 0
    sums_under_way: int = 0


def hold(config: ValidateConfig) -> Held:
    """A training step, its memory looked at whenever a segment is computed with or its gradients are taken."""
    most: dict[str, int] = defaultdict(int)

    def note(**sizes: int) -> None:
        for name, size in sizes.items():
            most[name] = max(most[name], size)

    @contextmanager
    def use(self: Masters, segment: Segment, then: Segment | None) -> Iterator[None]:
        with right_use(self, segment, then):
            coming = [bucket for segment in getattr(self, "_coming", ()) for bucket in self.uses[segment]]
            note(block_weights=bytes_of(weights), coming_weights=4 * sum(each.pieces.numbers for each in coming) * self.axis.size)
            yield

    def take(self: Masters, segment: Segment) -> None:
        note(block_gradients=gradients_of(weights))
        right_take(self, segment)
        note(sums_under_way=4 * sum(bucket.pieces.numbers for bucket, _ in self._pending) * self.axis.size)

    with one_thread(), Storages() as storages:
        model = build_model(config, mesh_of(config.mesh), CPU)
        masters, weights = model.masters, [kept.weight for kept in model.masters.kept.values()]
        for name, weight in model.named_parameters():
            masters.fill(name, torch.full([part.stop - part.start for part in layout_of(weight).region], 0.01))
        adamw = build_adamw(model, config.optimizer)
        kind = type(masters)
        right_use, right_take = kind.use, kind.take
        with mock.patch.object(kind, "use", use), mock.patch.object(kind, "take", take):
            compute_gradients(model, random_batch(config.batch.samples, config.batch.seq_len, 61), 1)
        gc.collect()
        everything = storages.held()
        adamw.step()
        states = bytes_of(x for state in adamw.state.values() for x in state.values() if x.dim())
        kept = [tensor for each in masters.kept.values() for tensor in (each.weight.data, each.master.data, each.stored)]
        return Held(bytes_of(kept), gradients_of(masters.parameters()), states, everything, **most)


EIGHT_LAYERS = ModelConfig()
FLOAT = 4


@pytest.mark.parametrize("mesh", [MeshConfig(dp_size=2), MeshConfig(dp_size=2, cp_size=2)], ids=["dp 2", "dp 2 x cp 2"])
@pytest.mark.parametrize("zero", STAGES)
def test_what_is_cut_falls_to_its_share_of_the_8_layer_model(pool: Pools, zero: int, mesh: MeshConfig) -> None:
    """To 1 / (dp x cp), not by it; beside it there is one block's whole weights and gradients, and another on its way."""
    config = ValidateConfig(
        model=EIGHT_LAYERS,
        mesh=mesh,
        strategy=StrategyConfig(zero=zero),
        batch=BatchConfig(seq_len=8, micro_batch_size=1, global_batch_size=4),
        dtype="float32",
    )
    n, whole = mesh.world_size, EIGHT_LAYERS.num_parameters * FLOAT
    segments = [sum(w.numel() for w in segment.weights) for segment in Model(EIGHT_LAYERS, device="meta").masters.segments]
    largest = max(segments) * FLOAT
    ranks = pool(n).run(hold, config)
    for name, size, cut in (("states", 2 * whole, zero >= 1), ("gradients", whole, zero >= 1), ("parameters", whole, zero == 3)):
        for rank in ranks:
            assert getattr(rank, name) == pytest.approx(size / n if cut else size, rel=0.02), name
        assert not cut or sum(getattr(rank, name) for rank in ranks) == size, "each element is kept by one rank"
    for rank in ranks:
        # Gradients are cut by ZeRO 1 as soon as they are summed; while they are added up they are whole.
        assert rank.everything == pytest.approx(rank.parameters + rank.gradients, rel=0.01), "nothing else is held"
        assert rank.block_weights <= (largest if zero == 3 else whole)
        assert rank.coming_weights <= (largest if zero == 3 else 0)
        assert rank.block_gradients <= largest
        assert rank.sums_under_way <= (largest if zero >= 2 else whole)


# Long sums


def count_to_512(config: ValidateConfig) -> tuple[set[float], torch.dtype]:
    """The gradient of the final norm's weights after 512 microbatches in which it is 1.0, and its dtype.

    All hidden states are 1, since the blocks add nothing to an embedding of ones; their sum is differentiated.
    """
    with one_thread():
        model = build_model(config, mesh_of(config.mesh), CPU)
        for name, weight in model.named_parameters():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            region = [part.stop - part.start for part in layout_of(weight).region]
            model.masters.fill(name, torch.full(region, 0.0 if adds else 1.0))
        mine = config.passes
        ones = Piece(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
        model.masters.begin(mine)
        run_pipeline(model, [ones] * mine, lambda x_sBD, _: x_sBD.sum(), backward=True)
        model.masters.finish()
        gradient, layout = model.masters.gradients()["model.norm.weight"]
        return set(gather_whole(gradient, layout).tolist()), gradient.dtype


def long_sum(dp: int, zero: int, **numbers: Any) -> ValidateConfig:
    return config_of(dp=dp, zero=zero, layers=1, hidden=16, kv_heads=8, passes=512 // dp, seq_len=2, **numbers)


@pytest.mark.parametrize("numbers", [{"dtype": "bfloat16"}, {"precision": "mixed"}], ids=str)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero", STAGES)
def test_512_gradients_of_1_in_bfloat16_add_up_to_512(pool: Pools, zero: int, dp: int, numbers: Row) -> None:
    assert pool(dp).run(count_to_512, long_sum(dp, zero, **numbers)) == [({512.0}, torch.float32)] * dp


@pytest.mark.parametrize("zero", [0, 2])
def test_a_sum_in_bfloat16_stops_at_256(zero: int) -> None:
    plain = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(512):
        plain += 1.0
    assert plain.item() == 256.0
    with mock.patch.object(zeros, "wider", lambda dtype: dtype):
        assert count_to_512(long_sum(1, zero, dtype="bfloat16")) == ({256.0}, torch.bfloat16)


# Bytes


@dataclass
class Sent:
    """What a rank sent over the data axis: in a step, of it under each action, in the update; and what its weights come to."""

    entries: list[Entry]
    numbers: int
    padded: int
    uses: int  # padded numbers, a weight counting as often as segments use it
    uses_by_chunk: dict[int, int]
    axis: int
    passes: int


def send(config: ValidateConfig) -> Sent:
    with one_thread():
        model = build(config)
        n, adamw = model.mesh.data.size, build_adamw(model, config.optimizer)
        batch = random_batch(config.batch.samples, 16, 61)
        with ledger() as entries:
            train_step(model, adamw, batch, config.batch.micro_batch_size, 1.0)

        def padded(weight: Tensor) -> int:
            return n * math.ceil(weight.shape[0] / n) * weight.shape[1:].numel()

        whole = {id(weight): weight for weight in model.parameters()}
        segments = model.segments.items()
        return Sent(
            # Loss and norm are one number each.
            [entry for entry in entries if entry.axis in ("dp", "cp", "dp x cp") and entry.kind in KINDS and entry.sent_bytes > 16],
            sum(weight.numel() for weight in whole.values()),
            sum(map(padded, whole.values())),
            sum(padded(weight) for _, chunk in segments for segment in chunk for weight in segment.weights),
            {number: sum(padded(w) for segment in chunk for w in segment.weights) for number, chunk in segments},
            n,
            config.passes,
        )


KINDS = ("all_reduce", "reduce_scatter", "all_gather")
# Weight and gradient bytes.
WIDTHS = {"float64": (8, 8), "float32": (4, 4), "bfloat16": (2, 4)}
SENDERS: dict[str, Row] = {
    "dp 2": {},
    "dp 3, untied": {"dp": 3, "tied": False},
    "dp 2 x cp 2": {"other": "cp-ring"},
    "dp 2 x tp 2": {"other": "tp+sp+vp"},
    "1f1b": {"other": "1f1b", "passes": 3},
    "zb-h1": {"other": "zb-h1", "passes": 3},
    "zb-v": {"more": {"pp_size": 2, "pp_schedule": "zb-v"}, "layers": 4, "passes": 3},
    "recomputed": {"recompute": "block"},
}


def sent_bytes(entries: list[Entry], *kinds: str) -> int:
    return sum(entry.sent_bytes for entry in entries if entry.kind in kinds)


def check_step(sent: Sent, zero: int, w: int, g: int) -> None:
    """The table of zero.py, per step."""
    n, m = sent.axis, sent.passes
    sums, gathers = sent_bytes(sent.entries, "all_reduce", "reduce_scatter"), sent_bytes(sent.entries, "all_gather")
    closed = {
        0: (2 * (n - 1) * sent.numbers * g // n, 0),
        1: ((n - 1) * sent.padded * g // n, (n - 1) * sent.padded * w // n),
        2: ((n - 1) * sent.uses * m * g // n, (n - 1) * sent.padded * w // n),
        3: ((n - 1) * sent.uses * m * g // n, (n - 1) * sent.uses * m * 2 * w // n),
    }
    # An entry's bytes are a whole number, and 2 (n-1)/n of a bucket need not be one.
    assert (sums, gathers) == pytest.approx(closed[zero], abs=len(sent.entries) if n == 3 else 0)
    assert {entry.kind for entry in sent.entries} == {
        0: {"all_reduce"},
        1: {"reduce_scatter", "all_gather"},
        2: {"reduce_scatter", "all_gather"},
        3: {"reduce_scatter", "all_gather"},
    }[zero]


def check_microbatches(sent: Sent, zero: int, w: int, g: int, put_off: bool) -> None:
    """When: each microbatch's forward and backward of a chunk by itself."""
    n = sent.axis
    by_action: dict[str, list[Entry]] = defaultdict(list)
    for entry in sent.entries:
        by_action[entry.action].append(entry)
    whole = ("all_reduce",) if zero == 0 else ("reduce_scatter",)
    for chunk, uses in sent.uses_by_chunk.items():
        for i in range(sent.passes):
            forward = by_action.pop(f"F chunk {chunk} microbatch {i}", [])
            inputs = by_action.pop(f"{'I' if put_off else 'B'} chunk {chunk} microbatch {i}", [])
            later = by_action.pop(f"W chunk {chunk} microbatch {i}", []) if put_off else inputs
            assert sent_bytes(forward, *KINDS) == ((n - 1) * uses * w // n if zero == 3 else 0)
            assert sent_bytes(inputs, "all_gather") == ((n - 1) * uses * w // n if zero == 3 else 0)
            if zero >= 2:
                assert sent_bytes(later, *whole) == (n - 1) * uses * g // n
            elif i < sent.passes - 1:
                assert not later, "sums of ZeRO 0 and 1 wait for the last microbatch"
    rest = [entry for entries in by_action.values() for entry in entries]
    assert {entry.kind for entry in rest} == ({"all_gather"} if zero in (1, 2) else set()), "the update's weights, and no more"


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in SENDERS), ("1f1b", "float32"), ("1f1b", "bfloat16"), ("dp 2", "bfloat16")]
)
def test_a_step_sends_its_closed_form(pool: Pools, name: str, zero: int, dtype: str) -> None:
    row = SENDERS[name]
    config = config_of(**{"zero": zero, "dtype": dtype, **row})
    for sent in pool(config.mesh.world_size).run(send, config):
        check_step(sent, zero, *WIDTHS[dtype])
        if "cp_size" not in OTHERS[row.get("other", "nothing")]:
            check_microbatches(sent, zero, *WIDTHS[dtype], put_off="zb" in config.pipeline.pp_schedule)


def evaluated(config: ValidateConfig) -> tuple[int, int]:
    with one_thread():
        model = build(config)
        with ledger() as entries:
            evaluate(model, [random_batch(4, 16, 61)], 1)
        weights = [w for segments in model.segments.values() for segment in segments for w in segment.weights]
        numbers = sum(2 * math.ceil(w.shape[0] / 2) * w.shape[1:].numel() for w in weights)
        return sent_bytes(entries, "all_gather"), numbers


@pytest.mark.parametrize("zero", STAGES)
def test_evaluation_gathers_under_zero_3_only(pool: Pools, zero: int) -> None:
    for sent, numbers in pool(2).run(evaluated, config_of(zero=zero)):
        assert sent == (2 * numbers * 8 // 2 if zero == 3 else 0), "once a microbatch, of which each rank has two"
