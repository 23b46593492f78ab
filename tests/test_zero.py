"""Data parallelism and ZeRO are the dense model, under every other axis: numbers, narrow numbers, files, copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minimind_tron.collectives import gather_whole
from minimind_tron.commands import validate
from minimind_tron.interop import load_weights, save_hugging_face
from minimind_tron.model import build_model
from minimind_tron.optim import build_adamw
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import evaluate, logits_of, train_step
from tests.covering import Row, pairwise
from tests.meshes import mesh_of, random_batch
from tests.proving import Pools, name_of, one_thread, passes, rows_of
from tests.zero_cases import CPU, OTHERS, STAGES, build, config_of, passes_uneven, uneven_batch

LISTED: dict[str, tuple[Any, ...]] = {
    "dp": (2, 4),
    "zero": STAGES,
    "other": tuple(OTHERS),
    "recompute": ("none", "block", "selective"),
    "dropout": (0.0, 0.1),
}


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
