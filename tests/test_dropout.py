"""What is dropped depends on what is dropped and on nothing else: the bits, the function, whole models on meshes, planted bugs."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimind_tron import model as models
from minimind_tron import step as steps
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.dropout import LANES, PLACES, Noise, Place, Tokens, bits, drop, keep_mask
from minimind_tron.judge import Report
from minimind_tron.model import Model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel.context import SequenceMap
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import compute_gradients, evaluate, logits_of, microbatches, own_pieces, train_step
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row
from tests.meshes import lonely, mesh_of, randn, random_batch
from tests.proving import Pools, on_rank, one_thread, passes

NOISE = Noise(0.3, seed=42, step=7)
MOST = 2**64 - 1

# The bits


def words(counter: list[int], key: list[int]) -> list[str]:
    """The first block of numpy's Philox for a counter; it counts one up before it draws."""
    number = (sum(word << 64 * i for i, word in enumerate(counter)) - 1) % 2**256
    before = np.array([number >> 64 * i & MOST for i in range(4)], np.uint64)
    found = np.random.Philox(key=np.array(key, np.uint64), counter=before).random_raw(4)
    return [f"{int(word):016x}" for word in found]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ([MOST] * 4, [MOST] * 2, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_philox_gives_its_published_answers(counter: list[int], key: list[int], expected: str) -> None:
    """philox4x64 of 10 rounds in the known answers of Random123."""
    assert words(counter, key) == expected.split()


def hexed(row: np.ndarray) -> str:
    return " ".join(f"{int(word):08x}" for word in row)


def test_the_bits_of_a_row_are_these() -> None:
    """A run that was begun with another numpy or on another platform must go on with the same masks."""
    expected = "0650e0cd 3995d75a 45f6696b d9b9013e bd460c7c e37e2931 065d5581 9bf87f5f fb34d3be 2cdf274a 4955516d e4f48a85"
    assert hexed(bits(NOISE, 3, "attention", 5, 11, 1, 12)[0]) == expected
    # The counter is (position * blocks, sample, layer, place); the second block counts one up. Low halves come first.
    drawn = words([23, 5, 3, 2], [42, 7]) + words([24, 5, 3, 2], [42, 7])
    assert hexed(bits(NOISE, 3, "attention", 5, 11, 1, 16)[0]) == " ".join(f"{word[8:]} {word[:8]}" for word in drawn)


def test_a_mask_is_these_places() -> None:
    mask = keep_mask(NOISE, Tokens([11], [5]), 3, "attention", 12)
    assert mask.dtype == torch.bool
    assert mask.shape == (1, 1, 12)
    # Below 0.3 * 2^32 = 4ccccccc, from the row above.
    assert (~mask).nonzero()[:, -1].tolist() == [0, 1, 2, 6, 9, 10]


def every_block(width: int) -> np.ndarray:
    """The blocks of all samples, layers and places, as far as they are used."""
    found = []
    for sample, layer, place in itertools.product(range(3), range(4), PLACES):
        rows = bits(NOISE, layer, place, sample, 0, 40, width)
        whole = np.zeros((40, -(-width // LANES) * LANES), np.uint32)
        whole[:, :width] = rows
        found.append(whole.reshape(-1, LANES))
    return np.concatenate(found)


@pytest.mark.parametrize("width", [8, 13, 24])
def test_no_two_positions_or_blocks_use_one_counter(width: int) -> None:
    blocks = every_block(width)
    assert len(blocks) == 3 * 4 * 2 * 40 * -(-width // LANES)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


def test_the_order_of_samples_uses_other_counters() -> None:
    """It is drawn with the key (seed, epoch), which is that of a step, and with the counters that have no place in them."""
    order = np.random.Philox(key=np.array([NOISE.seed, NOISE.step], np.uint64)).random_raw(4000).astype("<u8").view("<u4")
    both = np.concatenate([order.reshape(-1, LANES), every_block(24)])
    assert len(np.unique(both, axis=0)) == len(both)
    assert 0 not in PLACES.values()
    assert len(set(PLACES.values())) == len(PLACES)


# What a mask depends on

S, B, D = 24, 4, 21
WHOLE = keep_mask(NOISE, Tokens(range(S), range(B)), 2, "attention", D)
some = partial(st.lists, min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some(st.integers(0, S - 1)), some(st.integers(0, B - 1)))
def test_any_tokens_in_any_order_have_their_part_of_the_whole_mask(positions: list[int], samples: list[int]) -> None:
    assert torch.equal(keep_mask(NOISE, Tokens(positions, samples), 2, "attention", D), WHOLE[positions][:, samples])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_masks_of_ranks_make_the_whole_mask(size: int, layout: str) -> None:
    maps = [SequenceMap(lonely(size, rank), layout) for rank in range(size)]
    tokens = [Tokens(each.own(torch.arange(S)).tolist(), range(B)) for each in maps]
    assert torch.equal(maps[0].join([keep_mask(NOISE, each, 2, "attention", D) for each in tokens]), WHOLE)


def test_runs_have_no_gaps() -> None:
    assert Tokens([0, 1, 2, 9, 10, 4, 3, 3], []).runs() == [(0, 3), (9, 2), (4, 1), (3, 1), (3, 1)]
    assert Tokens(range(5, 9), []).runs() == [(5, 4)]


OTHERS: dict[str, tuple[Noise, Tokens, int, Place]] = {
    "seed": (dataclasses.replace(NOISE, seed=43), Tokens(range(S), range(B)), 2, "attention"),
    "step": (dataclasses.replace(NOISE, step=8), Tokens(range(S), range(B)), 2, "attention"),
    "seed and step changed about": (Noise(0.3, seed=7, step=42), Tokens(range(S), range(B)), 2, "attention"),
    "layer": (NOISE, Tokens(range(S), range(B)), 3, "attention"),
    "place": (NOISE, Tokens(range(S), range(B)), 2, "embedding"),
    "samples": (NOISE, Tokens(range(S), range(B, 2 * B)), 2, "attention"),
    "samples and layer changed about": (NOISE, Tokens(range(S), [2] * B), 1, "attention"),
    "positions": (NOISE, Tokens(range(S, 2 * S), range(B)), 2, "attention"),
    "positions moved by one": (NOISE, Tokens(range(1, S + 1), range(B)), 2, "attention"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_every_coordinate_changes_the_mask(other: tuple[Noise, Tokens, int, Place]) -> None:
    """Two masks without a common bit agree at a share of (1-p)^2 + p^2 of all places."""
    mask = keep_mask(*other, D)
    agree = 0.7**2 + 0.3**2
    assert abs((mask == WHOLE).double().mean() - agree) < 5 * math.sqrt(agree * (1 - agree) / mask.numel())


def test_no_generator_is_asked_and_none_is_moved() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = keep_mask(NOISE, Tokens(range(S), range(B)), 2, "attention", D)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(first, keep_mask(NOISE, Tokens(range(S), range(B)), 2, "attention", D))


# Statistics


@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    mask = keep_mask(Noise(rate, 3, 0), Tokens(range(256), range(4)), 0, "embedding", 300)
    assert abs((~mask).double().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["positions", "samples", "channels"])
@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_neighbours_are_not_correlated(dim: int, by: int) -> None:
    mask = keep_mask(Noise(0.5, 3, 0), Tokens(range(96), range(16)), 0, "embedding", 128).double() * 2 - 1
    product = mask * mask.roll(by, dim)
    assert abs(product.mean()) < 5 / math.sqrt(product.numel())


def test_no_row_and_no_column_is_dropped_more_than_others() -> None:
    mask = keep_mask(Noise(0.1, 3, 0), Tokens(range(256), range(16)), 0, "embedding", 128).double()
    for dims in ((0, 1), (1, 2), (0, 2)):
        shares = 1 - mask.mean(dims)
        assert (shares - 0.1).abs().max() < 5 * math.sqrt(0.1 * 0.9 * shares.numel() / mask.numel())


# The function


def dropped(rate: float, x: Tensor) -> Tensor:
    return drop(x, Noise(rate, 1, 2), Tokens(range(x.shape[0]), range(x.shape[1])), 0, "embedding")


@pytest.mark.parametrize("noise", [None, Noise(0.0, 1, 2)])
def test_without_a_rate_the_input_itself_comes_back(noise: Noise | None) -> None:
    x = randn(3, 2, 5, seed=0)
    assert drop(x, noise, Tokens(range(3), range(2)), 0, "embedding") is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_kept_elements_grow_and_dropped_ones_are_zero(rate: float, dtype: torch.dtype) -> None:
    x = randn(S, B, D, seed=0, dtype=dtype)
    mask = keep_mask(Noise(rate, 1, 2), Tokens(range(S), range(B)), 0, "embedding", D)
    y = dropped(rate, x)
    assert y.dtype == dtype
    assert torch.equal(y[mask], x[mask] / (1 - rate))
    assert (y[~mask] == 0).all()
    assert 0 < (~mask).sum() < mask.numel()


def test_a_dropped_element_is_zero_whatever_it_was() -> None:
    y = dropped(0.5, torch.full((S, B, D), torch.inf))
    assert set(y.unique().tolist()) == {0.0, math.inf}


def test_the_mean_stays() -> None:
    y = dropped(0.1, torch.ones(512, 4, 100, dtype=torch.float64))
    assert abs(y.mean() - 1) < 5 * math.sqrt(0.1 / 0.9 / y.numel())


def test_the_gradient_is_masked_like_the_output() -> None:
    x, dy = randn(S, B, D, seed=0).requires_grad_(), randn(S, B, D, seed=1)
    y = dropped(0.3, x)
    y.backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(x.grad, dropped(0.3, dy))


# Whole models


def config_of(
    mesh: Row | None = None,
    strategy: Row | None = None,
    pipeline: Row | None = None,
    samples: int = 4,
    optimizer_steps: int = 2,
    dropout: float = 0.1,
    **others: Any,
) -> ValidateConfig:
    """A tiny model with uneven labels, in microbatches of one sample."""
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=61, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24
        ),
        mesh=MeshConfig(**(mesh or {})),
        strategy=StrategyConfig(**(strategy or {})),
        pipeline=PipelineConfig(**(pipeline or {})),
        batch=BatchConfig(seq_len=11, micro_batch_size=1, global_batch_size=samples),
        optimizer_steps=optimizer_steps,
        dropout=dropout,
        **others,
    )


SP: Row = {"sequence_parallel": True}
MESHES: dict[str, Row] = {
    "alone": {},
    "tp": {"mesh": {"tp_size": 2}},
    "tp, hidden, vocab cut": {"mesh": {"tp_size": 2}, "strategy": {"vocab_parallel": True, "async_communication": True}},
    "sp": {"mesh": {"tp_size": 2}, "strategy": SP},
    "sp, gathers kept, vocab cut": {"mesh": {"tp_size": 2}, "strategy": {**SP, "vocab_parallel": True, "sp_recompute": False}},
    "cp zigzag": {"mesh": {"cp_size": 2}},
    "cp contiguous": {"mesh": {"cp_size": 2}, "strategy": {"cp_layout": "contiguous", "cp_comm_type": "all_gather"}},
    "dp": {"mesh": {"dp_size": 2}},
    "dp, everything cut": {"mesh": {"dp_size": 2}, "strategy": {"zero": 3}},
    "pp": {"mesh": {"pp_size": 2}},
    "pp zb-h1": {"mesh": {"pp_size": 2}, "pipeline": {"pp_schedule": "zb-h1"}},
    "block again": {"strategy": {"recompute": "block"}},
    "cp, all but matmuls again": {"mesh": {"cp_size": 2}, "strategy": {"recompute": "selective"}},
    "sp with cp": {"mesh": {"tp_size": 2, "cp_size": 2}, "strategy": SP},
}


@pytest.mark.parametrize("row", MESHES.values(), ids=MESHES.keys())
def test_every_mesh_drops_what_the_dense_model_drops(pool: Pools, row: Row) -> None:
    """transformers' model in float64, with the same masks after its embedding and its output projections."""
    passes(pool, config_of(**row))


def model_of(config: ValidateConfig) -> Model:
    built = Model(config.model, mesh_of(config.mesh), config.strategy, config.pipeline, dtype=torch.float64)
    initialise(built, config.seed, 0.1)
    return built


def tokens_on_rank(config: ValidateConfig) -> list[tuple[list[int], list[int]]]:
    """Positions and samples of every microbatch of this rank."""
    built, batch = model_of(config), validate.batch_of(config, 0)
    pieces = own_pieces(list(microbatches(batch, config.batch.micro_batch_size, built)), built.mesh.dp)
    tokens = [built.view(piece, built.loss, NOISE).tokens for piece in pieces]
    return [(list(each.positions), list(each.samples)) for each in tokens]


@pytest.mark.parametrize(
    ("row", "positions"),
    [
        (MESHES["sp"], [range(6), range(6, 12)]),
        (MESHES["cp zigzag"], [[0, 1, 2, 9, 10, 11], range(3, 9)]),
        (MESHES["cp contiguous"], [range(6), range(6, 12)]),
        (MESHES["sp with cp"], [[0, 1, 2], [9, 10, 11], [3, 4, 5], [6, 7, 8]]),
    ],
    ids=["sp", "cp zigzag", "cp contiguous", "sp with cp"],
)
def test_a_token_keeps_its_position_in_the_whole_sample(pool: Pools, row: Row, positions: list[Any]) -> None:
    config = config_of(**row)
    expected = [[(list(own), [sample]) for sample in range(4)] for own in positions]
    assert pool(config.mesh.world_size).run(tokens_on_rank, config) == expected


def test_a_sample_keeps_its_number_in_the_global_batch(pool: Pools) -> None:
    config = config_of(**MESHES["dp"])
    assert pool(2).run(tokens_on_rank, config) == [
        [(list(range(11)), [i]) for i in (0, 1)],
        [(list(range(11)), [i]) for i in (2, 3)],
    ]
    in_pairs = config.model_copy(update={"batch": BatchConfig(seq_len=11, micro_batch_size=2, global_batch_size=4)})
    assert [[samples for _, samples in rank] for rank in pool(2).run(tokens_on_rank, in_pairs)] == [[[0, 1]], [[2, 3]]]


def test_the_microbatch_size_changes_no_mask() -> None:
    built, batch = model_of(config_of()), random_batch(4, 11, 61)
    losses = [compute_gradients(built, batch, size, NOISE)[0] for size in (1, 2, 4)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-13)
    assert compute_gradients(built, batch, 1, dataclasses.replace(NOISE, seed=1))[0] != pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_stay_within_the_noise_floor(pool: Pools, dtype: str) -> None:
    passes(pool, config_of(**MESHES["cp zigzag"], samples=2, dtype=dtype))


# Training and evaluation


def trained(noise: Noise | None) -> tuple[float, list[Tensor]]:
    """The loss of a step, and the weights after it."""
    with one_thread():
        built = model_of(config_of())
        result = train_step(built, build_adamw(built, config_of().optimizer), random_batch(4, 11, 61), 2, 1.0, noise)
    return result.loss, [weight.detach() for weight in built.parameters()]


def test_a_step_is_bit_equal_when_made_again_and_another_when_it_is_the_next() -> None:
    (loss, weights), (same_loss, same), (next_loss, other) = (trained(noise) for noise in (NOISE, NOISE, Noise(0.3, 42, 8)))
    assert loss == same_loss
    assert all(map(torch.equal, weights, same))
    assert abs(loss - next_loss) > 1e-6
    assert not any(map(torch.equal, weights, other))
    assert abs(loss - trained(None)[0]) > 1e-6
    assert trained(None)[0] == trained(Noise(0.0, 42, 7))[0]


def test_evaluation_drops_nothing() -> None:
    built, batch = model_of(config_of()), random_batch(4, 11, 61)
    with mock.patch.object(models, "drop", side_effect=AssertionError("something was dropped")) as asked:
        asked.side_effect = lambda x, noise, *_, **__: x if noise is None else pytest.fail("something was dropped")
        assert evaluate(built, [batch], 2) == pytest.approx(compute_gradients(built, batch, 2)[0], rel=1e-13)
        assert logits_of(built, batch, 2).isfinite().all()
        assert asked.call_count == 3 * 2 * 3, "the embedding and two layers, in two microbatches, three times"
        with pytest.raises(pytest.fail.Exception, match="something was dropped"):
            compute_gradients(built, batch, 2, NOISE)
    assert evaluate(built, [batch], 2) != pytest.approx(compute_gradients(built, batch, 2, NOISE)[0], rel=1e-6)


# Planted bugs: each is put in on every rank, and validate must say FAIL.


def samples_numbered_on_each_rank() -> Any:
    right = steps.own_pieces

    def wrong(pieces: Any, dp: Any) -> Any:
        return [piece._replace(first=i) for i, piece in enumerate(right(pieces, dp))]

    return mock.patch.object(steps, "own_pieces", wrong)


def samples_numbered_in_each_microbatch() -> Any:
    return mock.patch.object(models, "Tokens", lambda positions, samples: Tokens(positions, range(len(samples))))


def positions_counted_on_each_rank() -> Any:
    return mock.patch.object(models, "Tokens", lambda positions, samples: Tokens(range(len(positions)), samples))


def drops(wrong: Callable[..., Tensor]) -> Any:
    """``drop`` of another kind, in the model only: the judge keeps its own."""

    def patched(x: Tensor, noise: Noise | None, tokens: Tokens, layer: int, place: Place) -> Tensor:
        return x if noise is None else wrong(x, noise, tokens, layer, place)

    return mock.patch.object(models, "drop", patched)


def masks_from_a_generator() -> Any:
    generator = torch.Generator().manual_seed(42)

    def wrong(x: Tensor, noise: Noise, *_: Any) -> Tensor:
        keep = torch.rand(x.shape, generator=generator, dtype=x.dtype) >= noise.rate
        return x * keep / (1 - noise.rate)

    return drops(wrong)


def kept_elements_do_not_grow() -> Any:
    return drops(lambda x, noise, *where: drop(x, noise, *where) * (1 - noise.rate))


def gradients_of_dropped_elements() -> Any:
    """The forward is right, and the backward knows nothing of it."""
    return drops(lambda x, noise, *where: x + (drop(x, noise, *where) - x).detach())


def same_mask_in_every_layer() -> Any:
    return drops(lambda x, noise, tokens, layer, place: drop(x, noise, tokens, 0, place))


def same_mask_at_every_place() -> Any:
    return drops(lambda x, noise, tokens, layer, place: drop(x, noise, tokens, layer, "embedding"))


def embedding_left_out() -> Any:
    return drops(lambda x, noise, tokens, layer, place: x if place == "embedding" else drop(x, noise, tokens, layer, place))


def runs_with(noise_for: Callable[[Noise | None, bool], Noise | None]) -> Any:
    right = steps.run_pipeline

    def wrong(model: Any, pieces: Any, finish: Any, *, backward: bool, noise: Noise | None = None, **others: Any) -> Any:
        return right(model, pieces, finish, backward=backward, noise=noise_for(noise, backward), **others)

    return mock.patch.object(steps, "run_pipeline", wrong)


def dropped_in_evaluation_too() -> Any:
    return runs_with(lambda noise, backward: noise if backward else Noise(0.1, 42, 0))


def same_mask_in_every_step() -> Any:
    return runs_with(lambda noise, backward: noise and dataclasses.replace(noise, step=0))


# What puts it in; on what; the first kind of finding that fails.
BUGS: dict[str, tuple[Callable[[], Any], Row, str]] = {
    "samples numbered from 0 on every rank of dp": (samples_numbered_on_each_rank, MESHES["dp"], "gradient"),
    "samples numbered from 0 in every microbatch": (samples_numbered_in_each_microbatch, {}, "gradient"),
    "positions counted on each rank of cp": (positions_counted_on_each_rank, MESHES["cp contiguous"], "gradient"),
    "positions counted on each rank of cp, zigzag": (positions_counted_on_each_rank, MESHES["cp zigzag"], "gradient"),
    "positions counted on each rank of tp under SP": (positions_counted_on_each_rank, MESHES["sp"], "gradient"),
    "masks from a generator": (masks_from_a_generator, MESHES["tp"], "gradient"),
    "kept elements do not grow": (kept_elements_do_not_grow, {}, "gradient"),
    "dropped elements have gradients": (gradients_of_dropped_elements, {}, "gradient"),
    "the same mask in every layer": (same_mask_in_every_layer, MESHES["pp"], "gradient"),
    "the same mask at every place": (same_mask_at_every_place, {}, "gradient"),
    "nothing dropped of the embedding": (embedding_left_out, {}, "gradient"),
    "dropped in evaluation too": (dropped_in_evaluation_too, {}, "logits"),
    "the same mask in every step": (same_mask_in_every_step, {}, "trained logits"),
}


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with BUGS[bug][0]():
        return on_rank(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    """Without it, ``test_every_mesh_drops_what_the_dense_model_drops`` has the same configuration pass."""
    _, row, first = BUGS[bug]
    report = pool(config_of(**row).mesh.world_size).run(with_bug, bug, config_of(**row))[0]
    assert not report.passed
    assert next(finding for finding in report.findings if not finding.passed).kind == first
    if first != "logits":
        assert all(finding.passed for finding in report.findings if finding.kind in ("logits", "loss"))
