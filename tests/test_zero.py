"""Data parallelism and ZeRO are the dense model, under every other axis: numbers, memory, bytes, copies, and planted bugs."""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from measurements.storages import Storages
from minimind_tron import optim, step
from minimind_tron import model as models
from minimind_tron.collectives import Pending, gather_whole
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.dropout import Tokens
from minimind_tron.interop import load_weights, save_hugging_face
from minimind_tron.judge import Report
from minimind_tron.layout import LaidOut, layout_of
from minimind_tron.ledger import Entry, ledger
from minimind_tron.mesh import Axis
from minimind_tron.model import Finish, Model, Piece, build_model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel import zero as zeros
from minimind_tron.parallel.segments import Segment
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.parallel.zero import Bucket, CutGradients, CutParameters, CutStates, Masters
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import compute_gradients, evaluate, logits_of, run_pipeline, train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row, pairwise
from tests.meshes import mesh_of, random_batch, tiny
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


def saved(config: ValidateConfig, folder: str) -> dict[str, Tensor]:
    """What a model holds after a step, having been written."""
    with one_thread():
        model = build(config)
        train_step(model, build_adamw(model, config.optimizer), random_batch(4, 15, 61), 1, 1.0)
        save_hugging_face(model, folder)
        return {name: gather_whole(value, layout) for name, (value, layout) in model.masters.values().items()}


def loaded(config: ValidateConfig, folder: str) -> dict[str, Tensor]:
    model = build_model(config, mesh_of(config.mesh), CPU)
    load_weights(model, folder)
    return {name: gather_whole(value, layout) for name, (value, layout) in model.masters.values().items()}


@pytest.mark.parametrize("precision", ["full", "mixed"])
@pytest.mark.parametrize("zero", STAGES)
def test_weights_are_written_and_read_as_by_one_process(pool: Pools, tmp_path: Any, zero: int, precision: str) -> None:
    config = config_of(zero=zero, tied=False, precision=precision)
    held = pool(2).run(saved, config, str(tmp_path))
    assert {value.dtype for value in held[0].values()} == {torch.float64 if precision == "full" else torch.float32}
    alone = loaded(config_of(dp=1, tied=False, precision=precision), str(tmp_path))
    for rank in [held[1], alone, *pool(2).run(loaded, config, str(tmp_path))]:
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
