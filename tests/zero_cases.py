"""Tiny runs with data parallelism and ZeRO beside every other axis, and batches in which some ranks have no label."""

from typing import Any
from unittest import mock

import torch

from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.judge import Report
from minimind_tron.model import Model, build_model, initialise
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.run_config import ValidateConfig
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row
from tests.meshes import mesh_of
from tests.proving import Pools, on_rank

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


def build(config: ValidateConfig) -> Model:
    """The model of a config on this worker's mesh."""
    model = build_model(config, mesh_of(config.mesh), CPU)
    initialise(model, config.seed, 0.1)
    return model
