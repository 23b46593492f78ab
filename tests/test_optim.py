"""The schedule's end points, who decays, and a norm that counts every element once on every mesh."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minimind_tron import optim
from minimind_tron.collectives import gather_whole
from minimind_tron.config import ModelConfig, OptimizerConfig
from minimind_tron.layout import draw, layout_of
from minimind_tron.mesh import build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.optim import build_adamw, clip_gradients, decays, global_norm, learning_rate_at, set_learning_rate
from minimind_tron.step import compute_gradients
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.pool import pool

# 61 rows are cut with padding; 2 kv heads are shared at tp 4 and 1 kv head already at tp 2.
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
TIED = ModelConfig(**SIZES, num_key_value_heads=2)
UNTIED = ModelConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True)
PLAIN, CUT = StrategyConfig(), StrategyConfig(sequence_parallel=True, vocab_parallel=True)
GARBAGE = 1e6


def build(config: ModelConfig, strategy: StrategyConfig) -> Model:
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    model = Model(config, build_mesh(MeshConfig(tp_size=size), rank, size), strategy, dtype=torch.float64)
    initialise(model, 0, spread=0.1)
    return model


def whole_gradients(model: Model) -> dict[str, Tensor]:
    """Some whole gradient for every parameter, the same on every mesh."""
    named = model.named_parameters()
    return {name: draw(f"gradient of {name}", replace(layout_of(w), fill="normal"), 1).double() for name, w in named}


def give_gradients(model: Model) -> None:
    """Each rank gets its region of the whole gradients, and garbage where there is only padding."""
    for (_, weight), whole in zip(model.named_parameters(), whole_gradients(model).values(), strict=True):
        layout = layout_of(weight)
        weight.grad = torch.full_like(weight, GARBAGE)
        layout.unpadded(weight.grad).copy_(whole[layout.region])


def norm_of_given(config: ModelConfig, strategy: StrategyConfig) -> tuple[float, float]:
    """The norm of given gradients, and what it would be if every rank's copy counted."""
    model = build(config, strategy)
    give_gradients(model)
    norm = float(global_norm(model.parameters(), model.mesh))
    right, optim.counts_here = optim.counts_here, lambda layout, mesh: True
    try:
        return norm, float(global_norm(model.parameters(), model.mesh))
    finally:
        optim.counts_here = right


def norm_of_step(config: ModelConfig, strategy: StrategyConfig) -> float:
    model = build(config, strategy)
    generator = torch.Generator().manual_seed(5)
    stream = torch.randint(0, config.vocab_size, (2, 10), generator=generator)
    compute_gradients(model, Batch(stream[:, :-1], stream[:, 1:]), 1)
    return float(global_norm(model.parameters(), model.mesh))


@pytest.mark.parametrize("strategy", [PLAIN, CUT], ids=["tp", "tp+sp+vp"])
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_norm_counts_every_element_once(size: int, config: ModelConfig, strategy: StrategyConfig) -> None:
    whole = whole_gradients(Model(config))
    wanted = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole.values()))
    norms = pool(size).run(norm_of_given, config, strategy)
    assert len({norm for norm, _ in norms}) == 1, "bit-equal on every rank"
    assert norms[0][0] == pytest.approx(wanted, rel=1e-13)
    if size > 1:
        assert norms[0][1] > wanted * (1 + 1e-3), "copies that count twice must show, or this test shows nothing"


@pytest.mark.parametrize("strategy", [PLAIN, CUT], ids=["tp", "tp+sp+vp"])
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("size", [2, 4])
def test_norm_of_a_step_is_that_of_one_process(size: int, config: ModelConfig, strategy: StrategyConfig) -> None:
    norms = pool(size).run(norm_of_step, config, strategy)
    assert norms == [norms[0]] * size
    assert norms[0] == pytest.approx(norm_of_step(config, PLAIN), rel=1e-11)


def test_norm_skips_weights_without_gradient() -> None:
    model = build(TIED, PLAIN)
    model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 0.5)
    assert float(global_norm(model.parameters(), model.mesh)) == pytest.approx(0.5 * math.sqrt(16))


def clipped(clip_norm: float) -> tuple[float, float, bool]:
    """The norm before and after clipping, and whether every gradient is bit-equal to what it was."""
    model = build(TIED, CUT)
    give_gradients(model)
    before = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    norm = global_norm(model.parameters(), model.mesh)
    clip_gradients(model.parameters(), norm, clip_norm)
    same = all(torch.equal(a, w.grad) for a, w in zip(before, model.parameters(), strict=True) if w.grad is not None)
    return float(norm), float(global_norm(model.parameters(), model.mesh)), same


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_ends_at_the_clip_norm(size: int) -> None:
    for before, after, same in pool(size).run(clipped, 0.25):
        assert before > 0.25
        assert after == pytest.approx(0.25, rel=1e-12)
        assert not same


@pytest.mark.parametrize("clip_norm", [0.0, 1e3], ids=["off", "above the norm"])
def test_clipping_leaves_alone(clip_norm: float) -> None:
    assert clipped(clip_norm)[2]


def groups(config: ModelConfig) -> tuple[list[str], list[str]]:
    """The names of parameters that decay, and of those that do not."""
    model = build(config, CUT)
    names = {id(weight): name for name, weight in model.named_parameters()}
    adamw = build_adamw(model, OptimizerConfig(weight_decay=0.3))
    decayed, spared = adamw.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    return sorted(names[id(w)] for w in decayed["params"]), sorted(names[id(w)] for w in spared["params"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_matrices_decay_on_every_mesh(size: int) -> None:
    for decayed, spared in pool(size).run(groups, UNTIED):
        assert spared == sorted(name for name in decayed + spared if name.endswith(("norm.weight", "bias")))
        assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"} <= set(decayed)
        assert len(decayed) == 9
        assert len(spared) == 4 + 5


def test_a_tied_head_is_one_parameter_of_adamw() -> None:
    decayed, _ = groups(TIED)
    assert "lm_head.weight" not in decayed
    assert decayed.count("model.embed_tokens.weight") == 1


def test_decay_is_decided_on_the_whole_tensor() -> None:
    model = build(TIED, PLAIN)
    assert decays(layout_of(model.model.embed_tokens.weight))
    assert not decays(layout_of(model.model.norm.weight))


def test_adamw_takes_the_configured_numbers() -> None:
    config = OptimizerConfig(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6)
    for group in build_adamw(build(TIED, PLAIN), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)


def test_set_learning_rate_reaches_every_group() -> None:
    adamw = build_adamw(build(TIED, PLAIN), OptimizerConfig())
    set_learning_rate(adamw, 0.125)
    assert [group["lr"] for group in adamw.param_groups] == [0.125, 0.125]


SCHEDULE = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 0.6), (110, 0.2)],
    ids=["first", "warming", "warm", "peak", "half way", "last"],
)
def test_schedule_end_points(step: int, wanted: float) -> None:
    assert learning_rate_at(step, 111, SCHEDULE) == pytest.approx(wanted, rel=1e-12)


def test_schedule_rises_then_falls_and_stays_above_the_floor() -> None:
    rates = [learning_rate_at(step, 111, SCHEDULE) for step in range(111)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates[10:]) == pytest.approx(0.2)


def test_schedule_without_warmup_starts_at_the_peak() -> None:
    config = OptimizerConfig(learning_rate=1.0)
    assert learning_rate_at(0, 5, config) == 1.0
    assert learning_rate_at(4, 5, config) == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_schedule_shorter_than_its_warmup_only_rises(steps: int) -> None:
    assert learning_rate_at(steps - 1, steps, SCHEDULE) == pytest.approx(steps / 10)


def gathered_after_steps(strategy: StrategyConfig) -> dict[str, Tensor]:
    """All parameters after two AdamW steps on given gradients."""
    model = build(UNTIED, strategy)
    adamw = build_adamw(model, OptimizerConfig(learning_rate=0.01))
    for _ in range(2):
        give_gradients(model)
        clip_gradients(model.parameters(), global_norm(model.parameters(), model.mesh), 0.5)
        adamw.step()
    return {name: gather_whole(weight.detach(), layout_of(weight)) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
def test_adamw_on_pieces_is_adamw_on_the_whole(size: int) -> None:
    wanted = gathered_after_steps(PLAIN)
    start = dict(build(UNTIED, PLAIN).named_parameters())
    for found in pool(size).run(gathered_after_steps, CUT):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14)
            assert not torch.equal(weight, start[name])
