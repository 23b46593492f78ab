"""Context parallelism is the dense model, whatever the way and the layout: maps, numbers, corner batches, and planted bugs."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from minimind_tron import collectives, optim, step
from minimind_tron import model as models
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.errors import TronError
from minimind_tron.judge import Report
from minimind_tron.mesh import Axis
from minimind_tron.model import Model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel import attention, context, ring
from minimind_tron.parallel.attention import Tile, own_tile
from minimind_tron.parallel.context import SequenceMap, repeats
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.run_config import ValidateConfig
from minimind_tron.sampling import greedy
from minimind_tron.step import train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row, pairwise
from tests.meshes import mesh_of, random_batch
from tests.proving import Pools, name_of, on_rank, passes, rows_of, without_sums

WAYS = ("all_gather", "a2a", "ring")
LAYOUTS = ("contiguous", "zigzag")


def axis_of(size: int, rank: int) -> Axis:
    """One rank's view of a cp that nobody talks over."""
    return Axis("cp", size, rank, tuple(range(size)))


# Which tokens are where


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_token_is_on_one_rank_and_comes_back_to_its_place(size: int, layout: str) -> None:
    maps = [SequenceMap(axis_of(size, rank), layout) for rank in range(size)]
    tokens = torch.arange(3 * maps[0].multiple(1) * 2).view(-1, 2)
    owned = [each.own(tokens) for each in maps]
    assert all((mine[1:] > mine[:-1]).all() for mine in owned), "positions ascend on every rank"
    assert torch.equal(torch.cat(owned).sort(0).values, tokens)
    assert all(torch.equal(torch.stack(owned), each.cut(tokens)) for each in maps)
    assert all(torch.equal(each.join(owned), tokens) and torch.equal(each.join(each.cut(tokens)), tokens) for each in maps)


def test_zigzag_takes_a_chunk_from_both_ends() -> None:
    eight = torch.arange(8)
    assert [SequenceMap(axis_of(2, rank), "zigzag").own(eight).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [SequenceMap(axis_of(2, rank), "contiguous").own(eight).tolist() for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("size", "layout", "parts", "multiple"),
    [
        (1, "zigzag", 1, 1),
        (1, "zigzag", 3, 3),
        (2, "zigzag", 1, 4),
        (2, "zigzag", 2, 4),
        (2, "zigzag", 3, 12),
        (3, "contiguous", 4, 12),
        (4, "contiguous", 1, 4),
    ],
)
def test_a_sequence_is_padded_to_what_can_be_cut(size: int, layout: str, parts: int, multiple: int) -> None:
    assert SequenceMap(axis_of(size, 0), layout).multiple(parts) == multiple


def pairs_in(tile: Tile, queries: Tensor, keys: Tensor) -> set[tuple[int, int]]:
    """The positions of every query and key that a tile pairs."""
    rows, columns = queries[tile.rows].tolist(), keys[tile.keys].tolist()
    return {(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if not tile.causal or j <= i}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_tiles_are_the_keys_before_each_query_once(size: int, layout: str) -> None:
    maps = [SequenceMap(axis_of(size, rank), layout) for rank in range(size)]
    positions = torch.arange(3 * maps[0].multiple(1))
    seen: list[tuple[int, int]] = []
    for mine in maps:
        others = dict(mine.other_tiles(len(mine.own(positions))))
        for source, theirs in enumerate(maps):
            tile = mine.tile(source, len(mine.own(positions)))
            if source == mine.axis.rank:
                assert tile == own_tile(len(mine.own(positions)))
                assert source not in others
            else:
                assert others.get(source) == tile
            if tile:
                found = pairs_in(tile, mine.own(positions), theirs.own(positions))
                assert tile.pairs == len(found)
                seen += found
    assert len(seen) == len(set(seen))
    assert set(seen) == {(q, k) for q in range(len(positions)) for k in range(q + 1)}


@pytest.mark.parametrize(("kv_heads", "ranks", "count"), [(4, 2, 1), (2, 4, 2), (1, 4, 4), (3, 2, 2), (4, 6, 3), (1, 1, 1)])
def test_kv_heads_are_repeated_until_ranks_can_share_them_out(kv_heads: int, ranks: int, count: int) -> None:
    assert repeats(kv_heads, ranks) == count


# The whole model


def config_of(
    cp: int = 2,
    way: str = "ring",
    layout: str = "auto",
    kv_heads: int = 2,
    sp: bool = False,
    seq_len: int = 15,
    tied: bool = True,
    samples: int = 4,
    steps: int = 3,
    vocab_size: int = 61,
    bias: bool = False,
    tp: int | None = None,
    pp: int = 1,
    schedule: str = "1f1b",
    strategy: Row | None = None,
    **others: Any,
) -> ValidateConfig:
    """A tiny model with 8 query heads and uneven labels, in microbatches of 2; ``sp`` is over tp 2."""
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2 * pp,
            num_attention_heads=8,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            attention_bias=bias,
        ),
        mesh=MeshConfig(tp_size=tp or (2 if sp else 1), cp_size=cp, pp_size=pp),
        strategy=StrategyConfig(sequence_parallel=sp, cp_comm_type=way, cp_layout=layout, **(strategy or {})),
        pipeline=PipelineConfig(pp_schedule=schedule),
        batch=BatchConfig(seq_len=seq_len, micro_batch_size=2, global_batch_size=samples),
        optimizer_steps=steps,
        log_interval=max(1, steps // 2),
        **others,
    )


LISTED: dict[str, tuple[Any, ...]] = {
    "cp": (1, 2, 4),
    "way": WAYS,
    "layout": LAYOUTS,
    "kv_heads": (8, 2, 1),
    "sp": (False, True),
    "seq_len": (15, 16, 33),
}


def by_oracle(rows: list[Row]) -> list[Row]:
    """Rows that one dense run judges stand together, on the ranks of one pool: the workers remember a few runs."""
    return sorted(rows, key=lambda row: (row["cp"] * (1 + row["sp"]), row["kv_heads"], row["seq_len"]))


@pytest.mark.parametrize("row", by_oracle(pairwise(LISTED)), ids=name_of)
def test_every_pair_of_settings_is_the_dense_model(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row))


@pytest.mark.full
@pytest.mark.parametrize("row", by_oracle(rows_of(LISTED)), ids=name_of)
def test_the_whole_product_over_20_steps(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row, steps=20))


CORNERS: dict[str, Row] = {
    "most ranks hold padding only, two tokens": {"cp": 4, "seq_len": 2},
    "most ranks hold padding only, three tokens gathered": {"cp": 4, "seq_len": 3, "way": "all_gather"},
    "most ranks hold padding only, contiguous by heads": {"cp": 4, "seq_len": 2, "way": "a2a"},
    "cp 3, an odd number": {"cp": 3, "seq_len": 17},
    "cp 3, gathered, contiguous": {"cp": 3, "seq_len": 17, "way": "all_gather", "layout": "contiguous"},
    "gathered keys are kept": {"way": "all_gather", "strategy": {"cp_regather": False}},
    "gathered keys are kept, cp 4, contiguous": {
        "way": "all_gather",
        "cp": 4,
        "layout": "contiguous",
        "strategy": {"cp_regather": False},
    },
    "untied, biases, an odd vocab over tp": {
        "tied": False,
        "bias": True,
        "sp": True,
        "strategy": {"vocab_parallel": True, "async_communication": True},
    },
    "tp without SP, kv heads fewer than tp": {"tp": 2, "kv_heads": 1, "strategy": {"vocab_parallel": True}},
    "1f1b": {"pp": 2, "samples": 6, "way": "ring"},
    "zb-h1, by heads": {"pp": 2, "samples": 6, "schedule": "zb-h1", "way": "a2a"},
    "zb-v, gathered": {"pp": 2, "samples": 6, "schedule": "zb-v", "way": "all_gather"},
    "tp 2 x pp 2 x cp 2, everything on": {
        "pp": 2,
        "samples": 6,
        "sp": True,
        "kv_heads": 1,
        "schedule": "zb-h1",
        "strategy": {"vocab_parallel": True, "async_communication": True},
    },
    "20 steps": {"cp": 4, "steps": 20, "kv_heads": 1},
}


@pytest.mark.parametrize("row", CORNERS.values(), ids=CORNERS.keys())
def test_corner_cases_are_the_dense_model(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_narrow_dtypes_stay_within_the_noise_floor(pool: Pools, way: str, dtype: str) -> None:
    passes(pool, config_of(cp=4, way=way, seq_len=33, dtype=dtype, samples=2, steps=2))


# Batches in which labels are rare


def labelled(samples: int, seq_len: int, places: tuple[tuple[int, int], ...]) -> Batch:
    """A batch with labels at some (sample, position) only."""
    batch = random_batch(samples, seq_len, 61)
    labels = torch.full_like(batch.ids_BS, IGNORED)
    for sample, position in places:
        labels[sample, position] = 7 + position
    return Batch(batch.ids_BS, labels)


RARE: dict[str, tuple[tuple[int, int], ...]] = {
    "one label, at the first position": ((0, 0),),
    "one label, in the middle": ((2, 7),),
    "one label, at the last position": ((3, 14),),
    "labels on the first rank only": ((0, 0), (1, 1), (2, 2), (2, 1)),
    "no label on the last rank": tuple((s, i) for s in range(4) for i in range(2, 11)),
    "labels in one sample only": tuple((1, i) for i in range(15)),
}


def on_rank_with(config: ValidateConfig, batch: Batch) -> Report:
    """A report on a given batch instead of the drawn one."""
    validate.dense_runs.cache_clear()
    try:
        with mock.patch.object(validate, "synthetic_batch", return_value=batch):
            return on_rank(config)
    finally:
        validate.dense_runs.cache_clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("places", RARE.values(), ids=RARE.keys())
def test_rare_labels(pool: Pools, places: tuple[tuple[int, int], ...], way: str) -> None:
    for cp, layout in ((4, "zigzag"), (4, "contiguous"), (2, "zigzag")):
        # A label at position 0 gives q and k no gradient, and AdamW would compare noise with noise.
        config = config_of(cp=cp, way=way, layout=layout, steps=0)
        report = pool(cp).run(on_rank_with, config, labelled(4, 15, places))[0]
        assert report.passed, f"cp {cp}, {layout}: {validate.verdict(report)}"


def build(config: ValidateConfig, dtype: torch.dtype = torch.float64) -> Model:
    """The model of a config on this worker's mesh."""
    built = Model(config.model, mesh_of(config.mesh), config.strategy, config.pipeline, dtype=dtype)
    initialise(built, config.seed, 0.1)
    return built


def step_without_labels(config: ValidateConfig) -> tuple[int, bool]:
    built = build(config)
    before = [weight.detach().clone() for weight in built.parameters()]
    result = train_step(built, build_adamw(built, config.optimizer), labelled(4, 15, ()), 2, 1.0)
    return result.valid_tokens, all(map(torch.equal, before, built.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_any_label_changes_nothing(pool: Pools, way: str) -> None:
    assert pool(2).run(step_without_labels, config_of(way=way)) == [(0, True)] * 2


# Copies


NUDGED = "model.layers.1.mlp.up_proj.weight"


def drift(config: ValidateConfig, steps: int, nudged: dict[int, str]) -> list[str]:
    """The parameters that differ between ranks after some steps in float32, a weight being nudged on each of some ranks."""
    built = build(config, torch.float32)
    adamw = build_adamw(built, config.optimizer)
    for number in range(steps):
        train_step(built, adamw, random_batch(4, 15, 61, seed=number), 2, 1.0)
    if built.mesh.rank in nudged:
        with torch.no_grad():
            built.get_parameter(nudged[built.mesh.rank]).view(-1)[0] += 1e-6
    return validate.differing_copies(built)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_copies_stay_bit_equal(pool: Pools, way: str, sp: bool) -> None:
    config = config_of(way=way, sp=sp, kv_heads=1)
    assert pool(config.mesh.world_size).run(drift, config, 10, {}) == [[]] * config.mesh.world_size


def test_a_copy_that_came_apart_over_cp_is_named(pool: Pools) -> None:
    for config, rank in ((config_of(), 1), (config_of(tp=2), 2), (config_of(tp=2), 3)):
        found = pool(config.mesh.world_size).run(drift, config, 0, {rank: NUDGED})
        assert found == [[NUDGED]] * config.mesh.world_size


def test_copies_that_came_apart_over_tp_and_cp_are_the_same_list_on_every_rank(pool: Pools) -> None:
    norm = "model.layers.0.input_layernorm.weight"
    found = pool(4).run(drift, config_of(tp=2), 0, {0: NUDGED, 3: norm})
    assert sorted(found[0]) == [norm, NUDGED]
    assert found == [found[0]] * 4


def refusal(config: ValidateConfig) -> str:
    try:
        greedy(build(config), [1, 2, 3], 2)
    except TronError as error:
        return str(error)
    return "text was made"


def test_text_is_not_generated(pool: Pools) -> None:
    assert pool(2).run(refusal, config_of()) == ["text cannot be generated over cp=2; use --cp-size 1 to generate"] * 2


# Planted bugs: each is put in on every rank, and validate must say FAIL.


def labels_shifted_after_the_cut() -> Any:
    """Each rank takes the next of its own tokens: its last label is lost, and in zigzag one is another chunk's first token."""
    right = Model.own

    def wrong(self: Model, x_SB: Tensor, padding: int) -> Tensor:
        if padding != IGNORED:
            return right(self, x_SB, padding)
        # Labels are the next tokens: moved back by one they stand where their tokens do.
        mine = right(self, x_SB.roll(1, 0), padding)
        return torch.cat((mine[1:], torch.full_like(mine[:1], IGNORED)))

    return mock.patch.object(Model, "own", wrong)


def positions_counted_on_each_rank() -> Any:
    """Every rank's tokens begin at position 0."""
    right = models.rotary_angles
    return mock.patch.object(models, "rotary_angles", lambda positions, *rest: right(torch.arange(len(positions)), *rest))


def joined_in_the_order_of_ranks() -> Any:
    """Zigzag is cut, but put together as if it were contiguous."""
    return mock.patch.object(SequenceMap, "join", lambda self, parts: torch.cat(list(parts)))


def without_hops(size: int, left_out: Callable[[bool, int], bool]) -> Any:
    """Some hops of each ring bring what the rank had itself, chosen by whether they are in a backward, and their number.

    In the forward, attention over the wrong keys. In the backward a sound loss, and weights that learn slowly or drift.
    """
    right, hops = ring.start_shift, Counter[bool]()

    def wrong(x: Tensor, axis: Axis) -> collectives.Pending:
        backward = torch._C._current_graph_task_id() != -1
        # A backward sends keys and, from its second step on, gradients.
        hop = hops[backward] % ((size - 1) * (2 if backward else 1))
        hops[backward] += 1
        return collectives.Pending(lambda: x) if left_out(backward, hop) else right(x, axis)

    return mock.patch.object(ring, "start_shift", wrong)


def gathered_gradients_not_summed() -> Any:
    """A rank's keys learn from its own queries only."""
    return mock.patch.object(context, "reduce_scatter", lambda x, axis: x.chunk(axis.size)[axis.rank])


def gradients_of_the_next_rank() -> Any:
    """The sums over all ranks are right, and each goes to the wrong one."""

    def wrong(x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x, axis).chunk(axis.size)[(axis.rank + 1) % axis.size]

    return mock.patch.object(context, "reduce_scatter", wrong)


def gradients_not_exchanged_back() -> Any:
    return mock.patch.object(collectives.AllToAll, "backward", staticmethod(lambda ctx, dy: (dy, None)))


def repeated_heads_learn_from_one_rank() -> Any:
    """The gradient of a repeated kv head is that of its first copy."""
    right = torch.Tensor.repeat_interleave

    def wrong(x: Tensor, count: int, dim: int) -> Tensor:
        # The oracle repeats heads, too, and keeps them beside the samples.
        if dim != 2:
            return right(x, count, dim)
        return torch.stack([x, *[x.detach()] * (count - 1)], dim + 1).flatten(dim, dim + 1)

    return mock.patch.object(torch.Tensor, "repeat_interleave", wrong)


def averaged_on_each_rank() -> Any:
    """Every rank divides by its own labels, and the ranks' means are averaged; a step here is one microbatch."""
    right = Model.loss

    def wrong(self: Model, x: Tensor, labels_SB: Tensor) -> Tensor:
        every, own = int((labels_SB != IGNORED).sum()), int((self.own(labels_SB, IGNORED) != IGNORED).sum())
        return right(self, x, labels_SB) * every / max(1, own) / self.mesh.cp.size

    return mock.patch.object(Model, "loss", wrong)


def own_labels_counted(layout: str) -> Any:
    """The number of labels that all divide by is that of a rank's own tokens: counted over DP, without CP."""

    def wrong(batch: Batch) -> int:
        mine = SequenceMap(mesh_of(MeshConfig(cp_size=2)).cp, layout).own(batch.labels_BS.T)
        return int((mine != IGNORED).sum())

    return mock.patch.object(step, "count_valid", wrong)


def ring_turned_round() -> Any:
    """Blocks travel the other way than who computes with them believes; on two ranks both ways are one."""
    right = ring.start_shift

    def wrong(x: Tensor, axis: Axis) -> collectives.Pending:
        return right(x, dataclasses.replace(axis, rank=axis.size - 1 - axis.rank, ranks=axis.ranks[::-1]))

    return mock.patch.object(ring, "start_shift", wrong)


def copies_counted_in_the_norm() -> Any:
    return mock.patch.object(optim, "counts_here", return_value=True)


def blocks_averaged() -> Any:
    """Blocks are merged as if each had the same share of the softmax."""
    return mock.patch.object(attention, "merge", lambda out, lse, more, more_lse: out.add_(more).div_(2))


def later_keys_seen() -> Any:
    """A contiguous rank computes with blocks that come after its queries, padding among them."""
    right = SequenceMap.tile

    def wrong(self: SequenceMap, source: int, tokens: int) -> Tile:
        return right(self, source, tokens) or Tile(slice(0, tokens), slice(0, tokens))

    return mock.patch.object(SequenceMap, "tile", wrong)


def merged_sum_forgotten() -> Any:
    """The merged output is right and its lse is that of the first block: a sound loss, and gradients too large."""
    right = attention.merge
    return mock.patch.object(attention, "merge", lambda out, lse, more, more_lse: right(out, lse.clone(), more, more_lse))


def block_taken_for_another() -> Any:
    """Blocks of other ranks are taken for those of the rank before: some of the future is seen, and the loss is too low."""
    right = SequenceMap.tile

    def wrong(self: SequenceMap, source: int, tokens: int) -> Tile | None:
        return right(self, source if source == self.axis.rank else (source - 1) % self.axis.size, tokens)

    return mock.patch.object(SequenceMap, "tile", wrong)


# What puts it in; on what; which finding fails; whether the first loss shows anything.
BUGS: dict[str, tuple[Callable[[], Any], Row, str, bool]] = {
    "labels shifted after the cut, zigzag": (labels_shifted_after_the_cut, {}, "loss", True),
    "labels shifted after the cut, contiguous": (labels_shifted_after_the_cut, {"layout": "contiguous"}, "loss", True),
    "local positions": (positions_counted_on_each_rank, {"layout": "contiguous"}, "logits", True),
    "put together in the order of ranks": (joined_in_the_order_of_ranks, {}, "logits", False),
    "put together in the order of ranks, by heads": (
        joined_in_the_order_of_ranks,
        {"way": "a2a", "layout": "zigzag"},
        "loss",
        True,
    ),
    "ring: last hop home left out": (lambda: without_hops(2, lambda backward, hop: backward and hop == 1), {}, "k_proj", False),
    "ring of four: last hop home left out": (
        lambda: without_hops(4, lambda backward, hop: backward and hop == 5),
        {"cp": 4},
        "v_proj",
        False,
    ),
    "ring of four: last hop of keys left out": (
        lambda: without_hops(4, lambda backward, hop: not backward and hop == 2),
        {"cp": 4},
        "logits",
        True,
    ),
    "ring of four: last hop of keys left out of the backward": (
        lambda: without_hops(4, lambda backward, hop: backward and hop == 3),
        {"cp": 4},
        "q_proj",
        False,
    ),
    "ring of four: a block taken for another rank's": (block_taken_for_another, {"cp": 4}, "logits", True),
    "all-gather: K/V gradients not summed": (gathered_gradients_not_summed, {"way": "all_gather"}, "k_proj", False),
    "all-gather: K/V gradients of another rank": (gradients_of_the_next_rank, {"way": "all_gather"}, "k_proj", False),
    "all-to-all: gradients not exchanged back": (gradients_not_exchanged_back, {"way": "a2a"}, "v_proj", False),
    "all-to-all: a repeated head's gradient not summed": (
        repeated_heads_learn_from_one_rank,
        {"way": "a2a", "kv_heads": 1},
        "v_proj",
        False,
    ),
    "loss averaged per rank": (averaged_on_each_rank, {}, "loss", True),
    "labels counted without cp, zigzag": (lambda: own_labels_counted("zigzag"), {}, "loss", True),
    "blocks go round the other way": (ring_turned_round, {"cp": 4}, "logits", True),
    "q-norm gradients not summed over cp": (lambda: without_sums("q_norm"), {}, "q_norm", False),
    "no gradient summed over cp": (lambda: without_sums(""), {}, "embed_tokens", False),
    "copies counted once per rank in the norm": (copies_counted_in_the_norm, {}, "gradient norm", False),
    "blocks merged by average": (blocks_averaged, {}, "logits", True),
    "keys after the query seen": (later_keys_seen, {"layout": "contiguous"}, "logits", True),
    "the merged log-sum-exp forgotten": (merged_sum_forgotten, {"way": "all_gather"}, "q_proj", False),
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """A bug, while the context is open."""
    with BUGS[bug][0]():
        yield


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with planted(bug):
        return on_rank(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    _, row, named, loss_shows = BUGS[bug]
    config = config_of(**{"seq_len": 16, "samples": 2, **row})
    clean = pool(config.mesh.world_size).run(on_rank, config)[0]
    assert clean.passed, f"without the bug: {validate.verdict(clean)}"
    report = pool(config.mesh.world_size).run(with_bug, bug, config)[0]
    assert not report.passed
    failed = [finding.name for finding in report.findings if not finding.passed]
    assert any(named in name for name in failed), f"{named} is not among {failed[:5]}"
    assert ("loss" in failed) == loss_shows, "what a look at the first loss would have told"
