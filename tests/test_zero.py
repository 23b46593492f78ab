"""Data parallelism and ZeRO are the dense model, under every other axis: numbers, memory, bytes, copies, and planted bugs."""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from measurements.storages import Storages
from minimind_tron import model as models
from minimind_tron import step
from minimind_tron.collectives import Pending, gather_whole
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.dropout import Tokens
from minimind_tron.interop import load_weights, save_hugging_face
from minimind_tron.judge import Report
from minimind_tron.layout import LaidOut, layout_of
from minimind_tron.ledger import Entry, ledger
from minimind_tron.mesh import Mesh
from minimind_tron.model import Model, Piece, build_model, initialise
from minimind_tron.optim import build_adamw, global_norm
from minimind_tron.parallel import zero as zeros
from minimind_tron.parallel.segments import Segment
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.parallel.zero import Bucket, CutGradients, CutStates, Masters
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import compute_gradients, evaluate, logits_of, run_pipeline, train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row, pairwise
from tests.meshes import mesh_of, random_batch
from tests.pool import RankError
from tests.proving import Pools, name_of, on_rank, one_thread, passes, rows_of

CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)
# What the ranks of dp do beside it.
OTHERS: dict[str, Row] = {
    "nothing": {},
    "tp+sp+vp": {"tp_size": 2, "sequence_parallel": True, "vocab_parallel": True},
    "cp-ring": {"cp_size": 2},
    "1f1b": {"pp_size": 2, "pp_schedule": "1f1b"},
    "zb-h1": {"pp_size": 2, "pp_schedule": "zb-h1"},
}
LISTED: dict[str, tuple[Any, ...]] = {
    "dp": (2, 4),
    "zero": STAGES,
    "other": tuple(OTHERS),
    "recompute": ("none", "block", "selective"),
    "dropout": (0.0, 0.1),
}


def config_of(
    dp: int = 2,
    zero: int = 0,
    other: str = "nothing",
    recompute: str = "none",
    dropout: float = 0.0,
    kv_heads: int = 1,
    tied: bool = True,
    vocab_size: int = 61,
    seq_len: int = 15,
    micro: int = 1,
    passes: int = 2,
    steps: int = 3,
    hidden: int = 32,
    layers: int | None = None,
    more: Row | None = None,
    **others: Any,
) -> ValidateConfig:
    """A tiny model with 8 query heads; each rank of dp has some microbatches."""
    row = {**OTHERS[other], **(more or {})}

    def those(kind: type[MeshConfig] | type[StrategyConfig] | type[PipelineConfig]) -> Row:
        return {name: value for name, value in row.items() if name in kind.model_fields}

    mesh = MeshConfig(dp_size=dp, **those(MeshConfig))
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers or 2 * mesh.pp_size,
            num_attention_heads=8,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            attention_bias=not tied,
        ),
        mesh=mesh,
        strategy=StrategyConfig(zero=zero, recompute=recompute, **those(StrategyConfig)),
        pipeline=PipelineConfig(**those(PipelineConfig)),
        batch=BatchConfig(seq_len=seq_len, micro_batch_size=micro, global_batch_size=dp * micro * passes),
        optimizer_steps=steps,
        log_interval=max(1, steps // 2),
        dropout=dropout,
        **others,
    )


# Labels on some ranks only


def uneven_batch(step: int, samples: int, seq_len: int, vocab_size: int, seed: int) -> Batch:
    """validate's batch, whose labels are uneven, and in every second step without any in the first or in the last half."""
    batch = validate_batch(step, samples, seq_len, vocab_size, seed)
    labels_BS = batch.labels_BS.clone()
    half = samples // 2
    if step % 2 == 0:
        labels_BS[half:] = IGNORED
    elif step % 4 == 1:
        labels_BS[:half] = IGNORED
    return Batch(batch.ids_BS, labels_BS)


validate_batch = validate.synthetic_batch
# The dense runs are remembered by config, so no other test may have this seed.
UNEVEN = 5


def on_rank_uneven(config: ValidateConfig) -> Report:
    with mock.patch.object(validate, "synthetic_batch", uneven_batch):
        return on_rank(config)


def passes_uneven(pool: Pools, config: ValidateConfig) -> None:
    config = config.model_copy(update={"seed": UNEVEN})
    report = pool(config.mesh.world_size).run(on_rank_uneven, config)[0]
    assert report.rule == "exact"
    assert report.passed, validate.verdict(report)


def by_oracle(rows: list[Row]) -> list[Row]:
    """Rows that one dense run judges stand together, on the ranks of one pool: the workers remember a few runs."""
    return sorted(rows, key=lambda row: (config_of(**row).mesh.world_size, "pp_size" in OTHERS[row["other"]], row["dropout"]))


@pytest.mark.parametrize("row", by_oracle(pairwise(LISTED)), ids=name_of)
def test_every_pair_of_settings_is_the_dense_model(pool: Pools, row: Row) -> None:
    passes_uneven(pool, config_of(**row))


@pytest.mark.full
@pytest.mark.parametrize("row", by_oracle(rows_of(LISTED)), ids=name_of)
def test_the_whole_product_is_the_dense_model(pool: Pools, row: Row) -> None:
    passes_uneven(pool, config_of(**row))


FOUR_RANKS: dict[str, Row] = {
    "dp 3, pieces of many sizes": {"dp": 3, "zero": 3, "tied": False},
    "some ranks keep nothing of some weights": {"dp": 4, "zero": 3, "hidden": 16, "kv_heads": 2, "vocab_size": 3},
    "optimizer states of nothing": {"dp": 4, "zero": 1, "hidden": 16, "kv_heads": 2, "vocab_size": 3},
    "ranks without a row of any norm of heads": {"dp": 4, "zero": 2, "hidden": 16, "kv_heads": 1, "tied": False},
    "untied, biases, ZeRO 1": {"zero": 1, "tied": False, "other": "tp+sp+vp"},
    "untied, biases, ZeRO 2": {"zero": 2, "tied": False, "other": "1f1b"},
    "untied, biases, ZeRO 3": {"zero": 3, "tied": False, "other": "tp+sp+vp", "recompute": "selective"},
    "a table on every rank of tp": {"zero": 3, "more": {"tp_size": 2, "sequence_parallel": True, "sp_recompute": False}},
    "tp without SP, hidden sums": {"zero": 2, "recompute": "block", "more": {"tp_size": 2, "async_communication": True}},
    "SP, hidden gathers, selective": {
        "zero": 3,
        "recompute": "selective",
        "dropout": 0.1,
        "other": "tp+sp+vp",
        "more": {"async_communication": True},
    },
    "keys gathered, zigzag": {"zero": 3, "other": "cp-ring", "recompute": "selective", "more": {"cp_comm_type": "all_gather"}},
    "heads exchanged": {"zero": 2, "other": "cp-ring", "recompute": "block", "more": {"cp_comm_type": "a2a"}, "dropout": 0.1},
    "cp alone is cut over, ZeRO 3": {"dp": 1, "zero": 3, "other": "cp-ring", "dropout": 0.1},
    "cp alone is cut over, ZeRO 1": {"dp": 1, "zero": 1, "other": "cp-ring"},
    "one rank, ZeRO 3, block": {"dp": 1, "zero": 3, "recompute": "block", "dropout": 0.1},
    "one rank, ZeRO 2, selective": {"dp": 1, "zero": 2, "recompute": "selective", "dropout": 0.1},
    "tp only, ZeRO 3": {"dp": 1, "zero": 3, "other": "tp+sp+vp"},
    "both ends of a pipeline in one stage": {"zero": 3, "more": {"pp_size": 2, "pp_schedule": "zb-v"}, "layers": 4, "dropout": 0.1},
    "interleaved": {"zero": 2, "more": {"pp_size": 2, "pp_schedule": "interleaved"}, "layers": 4, "passes": 4},
    "gpipe": {"zero": 3, "more": {"pp_size": 2, "pp_schedule": "gpipe"}, "passes": 3, "recompute": "block"},
    "one microbatch": {"zero": 2, "passes": 1},
    "fewer microbatches than stages": {"zero": 3, "passes": 1, "other": "zb-h1"},
    "microbatches of three samples": {"zero": 2, "micro": 3, "dropout": 0.1},
    "half of all is dropped": {"zero": 1, "dropout": 0.5, "recompute": "block"},
    "20 steps": {"zero": 3, "steps": 20, "dropout": 0.1, "tied": False},
}
EIGHT_RANKS: dict[str, Row] = {
    "tp 2 x pp 2 x dp 2": {"zero": 3, "recompute": "selective", "dropout": 0.1, "other": "tp+sp+vp", "more": {"pp_size": 2}},
    "pp 2 x cp 2 x dp 2": {"zero": 2, "dropout": 0.1, "other": "cp-ring", "more": {"pp_size": 2, "pp_schedule": "zb-h1"}},
    "tp 2 x cp 2 x dp 2": {"zero": 3, "recompute": "block", "other": "cp-ring", "more": {"tp_size": 2, "sequence_parallel": True}},
}
CORNERS = FOUR_RANKS | EIGHT_RANKS


@pytest.mark.parametrize("row", CORNERS.values(), ids=CORNERS.keys())
def test_corner_cases_are_the_dense_model(pool: Pools, row: Row) -> None:
    passes_uneven(pool, config_of(**row))


NARROW: dict[str, Row] = {
    "tp 2 x pp 2 x cp 2": {"dp": 1, "other": "tp+sp+vp", "more": {"pp_size": 2, "cp_size": 2}},
    "dp 2 x tp 2, ZeRO 3": {"zero": 3, "other": "tp+sp+vp"},
    "dp 2 x cp 2, ZeRO 1, dropout": {"zero": 1, "other": "cp-ring", "dropout": 0.1},
    "dp 2, ZeRO 2, selective": {"zero": 2, "recompute": "selective"},
}


@pytest.mark.parametrize("numbers", [{"dtype": "bfloat16"}, {"precision": "mixed"}, {"dtype": "float32"}], ids=str)
@pytest.mark.parametrize("row", NARROW.values(), ids=NARROW.keys())
def test_narrow_numbers_stay_within_the_noise_floor(pool: Pools, row: Row, numbers: Row) -> None:
    passes(pool, config_of(**row, **numbers, kv_heads=2, vocab_size=64, seq_len=32, steps=4))


# Forward only


def looks(config: ValidateConfig, samples: int) -> tuple[Tensor, float]:
    with one_thread():
        model = build(config)
        batch = random_batch(samples, 15, 61)
        return logits_of(model, batch, 2), evaluate(model, [batch, random_batch(2, 15, 61, seed=1)], 2)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("samples", [1, 5, 8])
def test_a_batch_that_dp_does_not_divide_is_evaluated_whole(pool: Pools, samples: int, zero: int) -> None:
    want_logits, want_loss = looks(config_of(dp=1), samples)
    for dp in (2, 3, 4):
        for logits, loss in pool(dp).run(looks, config_of(dp=dp, zero=zero), samples):
            torch.testing.assert_close(logits, want_logits, rtol=1e-12, atol=1e-12)
            assert loss == pytest.approx(want_loss, rel=1e-12)


def build(config: ValidateConfig) -> Model:
    """The model of a config on this worker's mesh."""
    model = build_model(config, mesh_of(config.mesh), CPU)
    initialise(model, config.seed, 0.1)
    return model


# Files


def saved(config: ValidateConfig, folder: Path) -> dict[str, Tensor]:
    """What a model holds after a step, having been written."""
    with one_thread():
        model = build(config)
        train_step(model, build_adamw(model, config.optimizer), random_batch(4, 15, 61), 1, 1.0)
        save_hugging_face(model, folder)
        return {name: gather_whole(value, layout) for name, (value, layout) in model.masters.values().items()}


def loaded(config: ValidateConfig, folder: Path) -> dict[str, Tensor]:
    model = build_model(config, mesh_of(config.mesh), CPU)
    load_weights(model, folder)
    return {name: gather_whole(value, layout) for name, (value, layout) in model.masters.values().items()}


@pytest.mark.parametrize("precision", ["full", "mixed"])
@pytest.mark.parametrize("zero", STAGES)
def test_weights_are_written_and_read_as_by_one_process(pool: Pools, tmp_path: Path, zero: int, precision: str) -> None:
    config = config_of(zero=zero, tied=False, precision=precision)
    held = pool(2).run(saved, config, tmp_path)
    assert {value.dtype for value in held[0].values()} == {torch.float64 if precision == "full" else torch.float32}
    alone = loaded(config_of(dp=1, tied=False, precision=precision), tmp_path)
    for rank in [held[1], alone, *pool(2).run(loaded, config, tmp_path)]:
        assert rank.keys() == held[0].keys()
        assert all(torch.equal(value, held[0][name]) for name, value in rank.items())


# Copies


NUDGED = "model.layers.1.mlp.up_proj.weight"


def drift(config: ValidateConfig, steps: int, nudged_rank: int | None) -> list[str]:
    """The parameters that differ between ranks after some steps; one weight may be nudged on a rank."""
    with one_thread():
        model = build(config)
        adamw = build_adamw(model, config.optimizer)
        for number in range(steps):
            train_step(model, adamw, uneven_batch(number, config.batch.samples, 15, 61, 0), 1, 1.0)
        if model.mesh.rank == nudged_rank:
            with torch.no_grad():
                model.get_parameter(NUDGED).view(-1)[-1] += 1e-2
        return validate.differing_copies(model)


@pytest.mark.parametrize("numbers", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"precision": "mixed"}], ids=str)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("zero", STAGES)
def test_copies_are_bit_equal_after_10_steps(pool: Pools, zero: int, other: str, numbers: Row) -> None:
    config = config_of(zero=zero, other=other, **numbers)
    assert pool(config.mesh.world_size).run(drift, config, 10, None) == [[]] * config.mesh.world_size


@pytest.mark.parametrize("numbers", [{"dtype": "float32"}, {"precision": "mixed"}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_copy_that_came_apart_over_dp_is_named(pool: Pools, zero: int, numbers: Row) -> None:
    config = config_of(zero=zero, other="tp+sp+vp", **numbers)
    assert pool(4).run(drift, config, 1, 3) == [[NUDGED]] * 4


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


# Planted bugs: each is put in on every rank, and validate must say FAIL.


def mean_of_means(config: ValidateConfig) -> Any:
    """Every rank divides by its own labels, and the ranks' means are averaged."""
    dp = mesh_of(config.mesh).dp

    def wrong(batch: Batch) -> int:
        own = batch.labels_BS.chunk(dp.size)[dp.rank]
        # A rank without any would go its own way, and the others would wait for it.
        return max(1, int((own != IGNORED).sum())) * dp.size

    return mock.patch.object(step, "count_valid", wrong)


@contextmanager
def last_microbatch_not_summed(config: ValidateConfig) -> Iterator[None]:
    """What the ranks hold of a sum lacks the other ranks' last microbatch."""
    calls: dict[Bucket, int] = defaultdict(int)
    right_start, right_begin = CutGradients._start_sum, Masters.begin

    def begin(self: Masters, passes: int) -> None:
        calls.clear()
        right_begin(self, passes)

    def start(self: Masters, bucket: Bucket, gradients: list[Tensor]) -> Pending:
        calls[bucket] += 1
        if calls[bucket] < config.passes:
            return right_start(self, bucket, gradients)
        own = bucket.pieces.pack(gradients, zeros.wider(gradients[0].dtype)).chunk(self.axis.size)[self.axis.rank]
        return Pending(lambda: own)

    with mock.patch.object(CutGradients, "_start_sum", start), mock.patch.object(Masters, "begin", begin):
        yield


@contextmanager
def last_microbatch_after_the_sum(config: ValidateConfig) -> Iterator[None]:
    """The sum starts a microbatch too early; the last one is added to it on each rank by itself."""
    late: list[tuple[LaidOut, Tensor]] = []
    right_take, right_finish = Masters.take, Masters.finish

    def take(self: Masters, segment: Segment) -> None:
        for weight in segment.weights:
            if self._left[id(weight)] == 1 and weight.grad is not None:
                late.append((self._of[id(weight)].master, weight.grad.clone()))
                weight.grad.zero_()
        right_take(self, segment)

    def finish(self: Masters) -> None:
        right_finish(self)
        while late:
            master, gradient = late.pop()
            assert master.grad is not None
            master.grad += layout_of(master).kept(gradient)

    with mock.patch.object(Masters, "take", take), mock.patch.object(Masters, "finish", finish):
        yield


def norm_of_own(weights: Iterable[LaidOut], mesh: Mesh) -> Tensor:
    """The norm of the gradients that a rank keeps."""
    squares = [weight.grad.double().square().sum() for weight in weights if weight.grad is not None]
    return torch.stack(squares).sum().sqrt()


def own_norm(config: ValidateConfig) -> Any:
    """Each rank clips by a norm of its own."""
    return mock.patch.object(step, "global_norm", norm_of_own)


def shard_of_the_next_rank(config: ValidateConfig) -> Any:
    """Gradients are compared as they are, and each shard is updated with that of another."""
    right = CutStates._deliver

    def wrong(self: CutStates, bucket: Bucket, summed: Tensor) -> None:
        axis = self.axis
        parts = zeros.start_all_gather(summed, axis).wait().chunk(axis.size)
        right(self, bucket, parts[(axis.rank + 1) % axis.size])

    return mock.patch.object(CutStates, "_deliver", wrong)


def samples_counted_on_each_rank(config: ValidateConfig) -> Any:
    """Every rank of dp numbers its samples from 0, and so all of them drop the same."""
    each = config.batch.samples // config.mesh.dp_size

    def wrong(positions: list[int], samples: range) -> Tokens:
        return Tokens(positions, [sample % each for sample in samples])

    return mock.patch.object(models, "Tokens", wrong)


def positions_counted_on_each_rank(config: ValidateConfig) -> Any:
    """Every rank of cp numbers its positions from 0, and so all of them drop the same."""
    return mock.patch.object(models, "Tokens", lambda positions, samples: Tokens(range(len(positions)), samples))


def gathered_in_another_order(config: ValidateConfig) -> Any:
    """Pieces of a gathered weight are put together from the last rank to the first."""
    right = CutStates._gathered

    def wrong(self: CutStates, bucket: Bucket, pending: Pending) -> None:
        right(self, bucket, Pending(lambda: torch.cat(pending.wait().chunk(self.axis.size)[::-1])))

    return mock.patch.object(CutStates, "_gathered", wrong)


def averaged_over_dp(config: ValidateConfig) -> Any:
    """Gradients that already are divided by all labels are divided by the ranks, too."""
    right = Masters._deliver
    return mock.patch.object(Masters, "_deliver", lambda self, bucket, summed: right(self, bucket, summed / self.axis.size))


def not_told_of_the_other_end(config: ValidateConfig) -> Any:
    """A tied matrix is summed over dp, and not over both ends of the pipeline."""
    return mock.patch.object(zeros, "sum_partial")


# What puts it in; on what; which finding fails.
BUGS: dict[str, tuple[Callable[[ValidateConfig], Any], Row, str]] = {
    "a mean of means over ranks": (mean_of_means, {}, "loss"),
    "all but the last microbatch, ZeRO 0": (last_microbatch_after_the_sum, {}, "embed_tokens"),
    "all but the last microbatch, ZeRO 1": (last_microbatch_after_the_sum, {"zero": 1}, "embed_tokens"),
    "all but the last microbatch, ZeRO 2": (last_microbatch_not_summed, {"zero": 2}, "norm"),
    "all but the last microbatch, ZeRO 3": (last_microbatch_not_summed, {"zero": 3}, "norm"),
    "clipped by each rank's own norm, ZeRO 1": (own_norm, {"zero": 1}, "logits after step"),
    "clipped by each rank's own norm, ZeRO 3": (own_norm, {"zero": 3}, "logits after step"),
    "clipped by each rank's own norm, tp": (own_norm, {"other": "tp+sp+vp"}, "logits after step"),
    "a shard updated with another's gradient, ZeRO 1": (shard_of_the_next_rank, {"zero": 1}, "all parameters"),
    "a shard updated with another's gradient, ZeRO 2": (shard_of_the_next_rank, {"zero": 2}, "all parameters"),
    "a shard updated with another's gradient, ZeRO 3": (shard_of_the_next_rank, {"zero": 3}, "all parameters"),
    "the same mask on two ranks of dp": (samples_counted_on_each_rank, {"dropout": 0.1}, "embed_tokens"),
    "the same mask on two ranks of dp, ZeRO 3": (samples_counted_on_each_rank, {"dropout": 0.1, "zero": 3}, "embed_tokens"),
    "the same mask on two ranks of cp": (positions_counted_on_each_rank, {"dropout": 0.1, "other": "cp-ring"}, "embed_tokens"),
    "the same mask on two ranks of tp under SP": (
        positions_counted_on_each_rank,
        {"dropout": 0.1, "other": "tp+sp+vp"},
        "embed_tokens",
    ),
    "gathered in another order after the update": (gathered_in_another_order, {"zero": 1}, "logits after step"),
    "gathered in another order before the forward": (gathered_in_another_order, {"zero": 3}, "logits"),
    "averaged over dp": (averaged_over_dp, {}, "embed_tokens"),
    "a tied matrix not summed over both ends": (not_told_of_the_other_end, {"other": "1f1b", "zero": 3}, "embed_tokens"),
}


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with BUGS[bug][0](config):
        return on_rank_uneven(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    _, row, named = BUGS[bug]
    config = config_of(**row, seed=UNEVEN, steps=2)
    clean = pool(config.mesh.world_size).run(on_rank_uneven, config)[0]
    assert clean.passed, f"without the bug: {validate.verdict(clean)}"
    report = pool(config.mesh.world_size).run(with_bug, bug, config)[0]
    assert not report.passed
    failed = [finding.name for finding in report.findings if not finding.passed]
    assert any(named in name for name in failed), f"{named} is not among {failed[:5]}"


def overflow(config: ValidateConfig, norm: Callable[..., Tensor]) -> tuple[bool, list[str]]:
    """Whether a step in which one gradient of one rank is infinite changed anything, and which copies it let come apart."""
    with one_thread():
        model = build(config)
        adamw = build_adamw(model, config.optimizer)
        before = {name: value.clone() for name, (value, _) in model.masters.values().items()}
        right, last = model.masters.finish, model.mesh.rank == model.mesh.size - 1

        def finish() -> None:
            right()
            if last:
                gradient = next(iter(model.masters.gradients().values()))[0]
                gradient.view(-1)[0] = math.inf

        with mock.patch.object(model.masters, "finish", finish), mock.patch.object(step, "global_norm", norm):
            train_step(model, adamw, random_batch(config.batch.samples, 15, 61), 1, 1.0)
        after = {name: value for name, (value, _) in model.masters.values().items()}
        return any(not torch.equal(value, after[name]) for name, value in before.items()), validate.differing_copies(model)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("zero", STAGES)
def test_an_overflow_that_one_rank_sees_stops_all(pool: Pools, zero: int, other: str) -> None:
    config = config_of(zero=zero, other=other)
    n = config.mesh.world_size
    assert pool(n).run(overflow, config, global_norm) == [(False, [])] * n


@pytest.mark.parametrize("other", ["nothing", "tp+sp+vp", "1f1b"])
@pytest.mark.parametrize("zero", [0, 3])
def test_an_overflow_that_its_rank_keeps_to_itself_is_caught(pool: Pools, zero: int, other: str) -> None:
    config = config_of(zero=zero, other=other)
    n = config.mesh.world_size
    planted = pool(n).run(overflow, config, norm_of_own)
    assert [changed for changed, _ in planted] == [True] * (n - 1) + [False], "the ranks part"
    assert zero == 3 or planted[0][1], "and their copies come apart"


def test_an_overflow_that_its_rank_keeps_to_itself_leaves_others_waiting_for_its_shard(pool: Pools) -> None:
    with pytest.raises(RankError):
        pool(2).run(overflow, config_of(zero=1), norm_of_own, timeout_s=20.0)
