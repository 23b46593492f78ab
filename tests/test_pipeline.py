"""Pipelines are the dense model, whatever the schedule: numbers, messages, memory, and planted bugs that validate must catch."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from minimind_tron import model as models
from minimind_tron import optim, step
from minimind_tron.collectives import gather_copies
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig, OptimizerConfig
from minimind_tron.interop import load_weights, save_hugging_face
from minimind_tron.judge import Report
from minimind_tron.layout import LaidOut, Layout, Storage, parameter
from minimind_tron.ledger import ledger
from minimind_tron.mesh import Axis, Mesh
from minimind_tron.model import Model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel import pipeline, zero
from minimind_tron.parallel.linear import multiply
from minimind_tron.parallel.messages import Compute, Receive, produced
from minimind_tron.parallel.pipeline import SENDS_UNDER_WAY, balanced, cut_layers, layer_costs
from minimind_tron.parallel.schedules import NAMES, Action, Costs, simulate
from minimind_tron.parallel.segments import Segment, Visit
from minimind_tron.parallel.zero import Masters
from minimind_tron.run_config import ValidateConfig
from minimind_tron.sampling import greedy
from minimind_tron.step import compute_gradients, evaluate, train_step
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from tests.covering import Row, pairwise
from tests.meshes import mesh_of, randn
from tests.proving import Pools, name_of, on_rank, one_thread, passes, rows_of

SP_VP = {"sequence_parallel": True, "vocab_parallel": True}


def config_of(
    schedule: str = "1f1b",
    p: int = 2,
    m: int = 4,
    tied: bool = True,
    tp: int = 1,
    layers: int = 8,
    virtual: int | None = None,
    layout: str | None = None,
    steps: int = 3,
    vocab_size: int = 61,
    seq_len: int = 7,
    strategy: Row | None = None,
    **others: Any,
) -> ValidateConfig:
    """A tiny model with uneven labels, in microbatches of one sample."""
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        ),
        mesh=MeshConfig(tp_size=tp, pp_size=p),
        pipeline=PipelineConfig(pp_schedule=schedule, virtual_stages=virtual, pp_layout=layout),
        strategy=StrategyConfig(**(strategy or {})),
        batch=BatchConfig(seq_len=seq_len, micro_batch_size=1, num_microbatches=m),
        optimizer_steps=steps,
        log_interval=max(1, steps // 2),
        **others,
    )


def model_of(config: ValidateConfig) -> Model:
    """The model of a config on this worker's mesh, as validate draws it."""
    built = Model(config.model, mesh_of(config.mesh), config.strategy, config.pipeline, dtype=torch.float64)
    initialise(built, config.seed, validate.SPREAD)
    return built


def by_oracle(rows: list[Row]) -> list[Row]:
    """Rows that one dense run judges stand together: the workers remember a few of those."""
    return sorted(rows, key=lambda row: (row["p"], row["m"], row["tied"]))


# Which layers are where


def costs_of(config: ModelConfig, layers: list[int]) -> list[float]:
    embedding, block, head = layer_costs(config)
    costs = [block * count for count in layers]
    costs[0] += embedding
    costs[-1] += head
    return costs


def deep(layers: int, vocab_size: int = 61) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
    )


@pytest.mark.parametrize("schedule", NAMES)
def test_every_layer_is_in_one_chunk(schedule: str) -> None:
    for layers, stages in itertools.product(range(1, 17), range(1, 9)):
        config = PipelineConfig(pp_schedule=schedule)
        count = stages * config.chunks_a_stage
        if count > layers:
            continue
        chunks = cut_layers(deep(layers), config, stages)
        assert [number for chunk in chunks for number in chunk.layers] == list(range(layers))
        assert len(chunks) == count
        assert all(chunk.layers for chunk in chunks)
        assert [chunk.number for chunk in chunks if chunk.first] == [0]
        assert [chunk.number for chunk in chunks if chunk.last] == [count - 1]


@pytest.mark.parametrize("vocab_size", [61, 1000, 6400, 50_000])
def test_the_slowest_chunk_is_as_fast_as_it_can_be(vocab_size: int) -> None:
    for layers, chunks in itertools.product(range(1, 11), range(1, 6)):
        if chunks > layers:
            continue
        config = deep(layers, vocab_size)
        borders = itertools.combinations(range(1, layers), chunks - 1)
        every = [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in borders]
        found = balanced(config, chunks)
        assert sum(found) == layers
        assert min(found) >= 1
        assert max(costs_of(config, found)) == min(max(costs_of(config, cut)) for cut in every), (layers, chunks)


def test_a_large_vocab_takes_layers_from_the_last_chunk() -> None:
    assert balanced(deep(16, 61), 4) == [4, 4, 4, 4]
    small, large = (balanced(deep(16, vocab_size), 4) for vocab_size in (1500, 50_000))
    assert small[-1] < 4
    assert large == [5, 5, 5, 1]


def test_a_layout_by_hand_is_taken_as_it_is() -> None:
    chunks = cut_layers(deep(6), PipelineConfig(pp_layout="3,1,1,1"), 4)
    assert [chunk.layers for chunk in chunks] == [range(0, 3), range(3, 4), range(4, 5), range(5, 6)]
    with pytest.raises(AssertionError, match="no 4 parts"):
        cut_layers(deep(7), PipelineConfig(pp_layout="3,1,1,1"), 4)


# The dense model: float64 at 1e-10


LISTED: dict[str, tuple[Any, ...]] = {"schedule": NAMES, "p": (1, 2, 4), "m": (1, 2, 3, 4, 5, 8), "tied": (True, False)}
WITH_TP: dict[str, tuple[Any, ...]] = {
    "schedule": NAMES,
    "p": (1, 2),
    "m": (1, 2, 3, 5),
    "tied": (True, False),
    "asynchronous": (False, True),
    "sp_recompute": (True, False),
}


def with_tp(asynchronous: bool, sp_recompute: bool, **row: Any) -> ValidateConfig:
    switches = {"async_communication": asynchronous, "sp_recompute": sp_recompute}
    return config_of(tp=2, layers=4 if row["p"] < 4 else 8, strategy=SP_VP | switches, **row)


@pytest.mark.parametrize("row", by_oracle(pairwise(LISTED)), ids=name_of)
def test_every_pair_of_settings_is_the_dense_model(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row))


@pytest.mark.parametrize("row", by_oracle(pairwise(WITH_TP)), ids=name_of)
def test_every_pair_of_settings_with_tp_sp_and_vp_is_the_dense_model(pool: Pools, row: Row) -> None:
    passes(pool, with_tp(**row))


@pytest.mark.full
@pytest.mark.parametrize("row", by_oracle(rows_of(LISTED)), ids=name_of)
def test_the_whole_product_over_10_steps(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row, steps=10))


@pytest.mark.full
@pytest.mark.parametrize("row", by_oracle(rows_of(LISTED)), ids=name_of)
def test_the_whole_product_with_tp_sp_and_vp_over_10_steps(pool: Pools, row: Row) -> None:
    passes(pool, with_tp(**row, asynchronous=False, sp_recompute=True, steps=10))


CORNERS: dict[str, Row] = {
    "one microbatch on four stages": {"p": 4, "m": 1, "schedule": "zb-h1"},
    "three microbatches on four folded stages": {"p": 4, "m": 3, "schedule": "zb-v"},
    "two microbatches on four interleaved stages": {"p": 4, "m": 2, "schedule": "interleaved"},
    "uneven by hand": {"p": 4, "layers": 6, "layout": "3,1,1,1"},
    "uneven and folded": {"p": 2, "layers": 6, "layout": "1,2,2,1", "schedule": "zb-v"},
    "three virtual stages": {"p": 2, "virtual": 3, "schedule": "interleaved", "m": 5},
    "one virtual stage": {"p": 2, "virtual": 1, "schedule": "interleaved", "m": 3},
    "one layer a chunk": {"p": 4, "layers": 4, "tied": False},
    "one layer a folded chunk": {"p": 2, "layers": 4, "schedule": "zb-v"},
    "a head as heavy as many layers": {"p": 2, "vocab_size": 3000, "schedule": "zb-h1"},
    "no clipping": {"p": 2, "optimizer": OptimizerConfig(clip_norm=0.0)},
    "a sequence that is padded": {"p": 2, "tp": 2, "seq_len": 5, "strategy": SP_VP, "schedule": "zb-v"},
    "tp without sp": {"p": 2, "tp": 2, "strategy": {"async_communication": True}, "schedule": "zb-h1"},
    "10 steps": {"p": 4, "steps": 10, "schedule": "zb-v"},
}


@pytest.mark.parametrize("row", CORNERS.values(), ids=CORNERS.keys())
def test_corner_cases_are_the_dense_model(pool: Pools, row: Row) -> None:
    passes(pool, config_of(**row))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_stay_within_the_noise_floor(pool: Pools, dtype: str) -> None:
    report = pool(2).run(on_rank, config_of("zb-h1", 2, 3, seq_len=32, vocab_size=64, dtype=dtype))[0]
    assert report.rule == "noise floor"
    assert report.passed, validate.verdict(report)


# Messages as large as gloo's buffers are not


WIDTH = 64


def toy_forward(weights: list[LaidOut], rows: int) -> Callable[[int, Tensor | None, int], Tensor]:
    def forward(chunk: int, x: Tensor | None, microbatch: int) -> Tensor:
        y = multiply(randn(rows, WIDTH, seed=microbatch) if x is None else x, weights[chunk])
        return y.square().mean() if chunk == 1 else y

    return forward


def toy_weights() -> list[LaidOut]:
    born = [parameter(Layout((WIDTH, WIDTH)), Storage(torch.float64, torch.device("cpu"))) for _ in (0, 1)]
    for chunk, weight in enumerate(born):
        weight.data.copy_(randn(WIDTH, WIDTH, seed=100 + chunk))
    return born


def large_messages(name: str, rows: int, m: int) -> bool:
    """Whether this stage's losses and weight gradient are those of one process, bit for bit."""
    whole, weights = toy_weights(), toy_weights()
    forward = toy_forward(whole, rows)
    losses = {i: forward(1, forward(0, None, i), i) for i in range(m)}
    for loss in losses.values():
        loss.backward()
    axis = mesh_of(MeshConfig(pp_size=2)).pp
    schedule, program = pipeline.plan(PipelineConfig(pp_schedule=name), 2, m, True)
    segments = [[Segment(str(i), [weights[i]], partial(toy_forward(weights, rows), i), Visit)] for i in (0, 1)]
    masters = Masters({"weight": weights[axis.rank]}, segments[axis.rank], Axis("dp x cp"))
    work = pipeline.Work(segments.__getitem__, lambda i: i, masters, lambda _: (rows, WIDTH), torch.float64, torch.device("cpu"))
    masters.begin(m)
    found = pipeline.run(schedule, program, axis, work)
    masters.finish()
    mine, other = weights[axis.rank], weights[1 - axis.rank]
    assert mine.grad is not None
    assert other.grad is None
    same = all(torch.equal(found[i], losses[i]) for i in range(m)) if axis.rank else found == {}
    return same and torch.equal(mine.grad, whole[axis.rank].grad)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("mib", [8, 16])
def test_messages_of_many_mib_arrive(pool: Pools, name: str, mib: int) -> None:
    assert pool(2).run(large_messages, name, mib * 2**20 // (8 * WIDTH), 5) == [True, True]


def posted_and_done(config: ValidateConfig) -> tuple[list[Any], set[int], int]:
    """Steps of this stage's program in the order in which they began; the tags of its messages, and how many messages it has."""
    begun, tags, stage = list[Any](), dict[Any, int](), pipeline._Stage
    right_post, right_act, right_parcel = stage.post, stage.act, stage.parcel

    def post(self: Any, step: Any) -> None:
        begun.append(step)
        right_post(self, step)

    def act(self: Any, action: Action) -> None:
        begun.append(Compute(action))
        right_act(self, action)

    def parcel(self: Any, message: Any) -> Any:
        found = right_parcel(self, message)
        tags[message] = found.tag
        return found

    with mock.patch.multiple(stage, post=post, act=act, parcel=parcel):
        compute_gradients(model_of(config), validate.batch_of(config, 0), 1)
    return begun, set(tags.values()), len(tags)


@pytest.mark.parametrize("name", NAMES)
def test_a_receive_after_an_action_is_posted_before_it_and_every_message_has_its_tag(pool: Pools, name: str) -> None:
    config = config_of(name, 2, 4)
    _, program = pipeline.plan(config.pipeline, 2, 4, True)
    for steps, (begun, tags, messages) in zip(program, pool(2).run(posted_and_done, config), strict=True):
        assert len(begun) == len(steps)
        assert set(begun) == set(steps)
        assert len(tags) == messages
        followed = [(one, two) for one, two in itertools.pairwise(steps) if isinstance(one, Compute) and isinstance(two, Receive)]
        assert followed
        assert all(begun.index(two) < begun.index(one) for one, two in followed)


# Bit for bit


Named = dict[str, Tensor]


def gradients_on_rank(config: ValidateConfig) -> tuple[Named, float] | None:
    """Every whole gradient and the loss, from rank 0."""
    with one_thread():
        built = model_of(config)
        batch = validate.batch_of(config, 0)
        found, _ = validate.ParallelSubject(built, config).gradients(batch)
        loss, _ = compute_gradients(built, batch, 1)
    return (found, loss) if built.mesh.rank == 0 else None


@lru_cache(maxsize=64)
def gradients(pool: Pools, config: ValidateConfig) -> tuple[Named, float]:
    return pool(config.mesh.world_size).run(gradients_on_rank, config)[0]


def differing(one: tuple[Named, float], other: tuple[Named, float]) -> list[str]:
    assert one[0].keys() == other[0].keys()
    names = [name for name, tensor in one[0].items() if not torch.equal(tensor, other[0][name])]
    return names + ["loss"] * (one[1] != other[1])


@pytest.mark.parametrize("tied", [True, False])
def test_gpipe_1f1b_and_interleaved_have_the_same_gradients(pool: Pools, tied: bool) -> None:
    """On 2 and on 4 stages alike: a tied matrix is summed from the same two halves."""
    first = gradients(pool, config_of("gpipe", 2, 5, tied))
    for p, name in itertools.product((2, 4), ("gpipe", "1f1b", "interleaved")):
        assert differing(first, gradients(pool, config_of(name, p, 5, tied))) == [], (p, name)


@pytest.mark.parametrize("tied", [True, False])
def test_one_stage_has_the_same_gradients_with_gpipe_and_1f1b(pool: Pools, tied: bool) -> None:
    assert differing(gradients(pool, config_of("gpipe", 1, 5, tied)), gradients(pool, config_of("1f1b", 1, 5, tied))) == []


def test_untied_gradients_are_the_same_with_every_schedule_on_any_number_of_stages(pool: Pools) -> None:
    first = gradients(pool, config_of("gpipe", 1, 5, False))
    for p, name in itertools.product((1, 2, 4), NAMES):
        assert differing(first, gradients(pool, config_of(name, p, 5, False))) == [], (p, name)


def test_tied_gradients_are_the_same_but_for_the_matrix_that_is_both(pool: Pools) -> None:
    """Where one stage holds both uses (zb-v, one stage), they are added up in the order in which they come there."""
    first = gradients(pool, config_of("gpipe", 2, 5))
    assert differing(first, gradients(pool, config_of("zb-h1", 2, 5))) == []
    for p, name in ((1, "gpipe"), (1, "zb-h1"), (2, "zb-v"), (4, "zb-v")):
        assert differing(first, gradients(pool, config_of(name, p, 5))) == ["model.embed_tokens.weight"], (p, name)


SLOW_S = 0.2


def slowed(config: ValidateConfig, slow_stage: int) -> tuple[Named, float] | None:
    right, stage = pipeline._Stage.act, mesh_of(config.mesh).pp.rank

    def act(self: Any, action: Action) -> None:
        if stage == slow_stage and (action.microbatch, action.chunk) == (1, stage):
            time.sleep(SLOW_S)
        right(self, action)

    with mock.patch.object(pipeline._Stage, "act", act):
        return gradients_on_rank(config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slow_stage", [0, 1])
def test_a_slow_stage_changes_no_bit(pool: Pools, name: str, slow_stage: int) -> None:
    config = config_of(name, 2, 3)
    assert differing(pool(2).run(slowed, config, slow_stage)[0], gradients(pool, config)) == []


# Tied on two stages


def train_tied(config: ValidateConfig, steps: int) -> tuple[list[bool], list[float]]:
    """Whether both ends hold the same embedding and AdamW states, and the norm of every step."""
    with one_thread():
        built, optimizer = model_of(config), config.optimizer
        adamw = build_adamw(built, optimizer)
        norms = [train_step(built, adamw, validate.batch_of(config, i), 1, optimizer.clip_norm).gradient_norm for i in range(steps)]
    if built.model.embed_tokens is None:
        return [], norms
    table = built.model.embed_tokens.weight
    states = {name: state for name, state in adamw.state[table].items() if state.shape}
    assert set(states) == {"exp_avg", "exp_avg_sq"}
    pairs = [gather_copies(tensor.detach(), built.mesh.ends) for tensor in (table, table.grad, *states.values())]
    return [len(pair) == built.mesh.ends.size and torch.equal(pair[0], pair[-1]) for pair in pairs], norms


@pytest.mark.parametrize("p", [2, 4])
def test_both_copies_of_a_tied_matrix_train_alike_and_count_once(pool: Pools, p: int) -> None:
    found = pool(p).run(train_tied, config_of(p=p), 5)
    _, dense = pool(1).run(train_tied, config_of(p=1), 5)[0]
    assert [same for same, _ in found] == [[True] * 4, *[[]] * (p - 2), [True] * 4]
    assert all(norms == found[0][1] for _, norms in found)
    assert found[0][1] == pytest.approx(dense, rel=1e-11)


# What every rank is told


def told(config: ValidateConfig) -> tuple[float, int, float]:
    with one_thread():
        built, batches = model_of(config), [validate.batch_of(config, i) for i in range(2)]
        return *compute_gradients(built, batches[0], 1), evaluate(built, batches, 1)


@pytest.mark.parametrize(("name", "p", "tp"), [("1f1b", 2, 1), ("interleaved", 4, 1), ("zb-v", 2, 2)])
def test_every_rank_is_told_the_dense_loss(pool: Pools, name: str, p: int, tp: int) -> None:
    config = config_of(name, p, 3, tp=tp, strategy=SP_VP if tp > 1 else None)
    found = pool(p * tp).run(told, config)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(pool(1).run(told, config_of(p=1, m=3))[0], rel=1e-12)


@torch.no_grad()
def continued(config: ValidateConfig) -> list[int]:
    """Weights as large as trained ones, so that the text depends on all of them."""
    with one_thread():
        built = model_of(config)
        for weight in built.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
        return greedy(built, [5, 17, 60], 12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_two_stages_continue_a_text_as_one_process_does(pool: Pools, name: str) -> None:
    (alone,) = pool(1).run(continued, config_of(p=1, tied=False))
    assert len(set(alone)) > 4
    assert pool(2).run(continued, config_of(name, tied=False)) == [alone, alone]


def save(config: ValidateConfig, folder: Path) -> None:
    with one_thread():
        save_hugging_face(model_of(config), folder, max_shard_size="40KB")


def loads(config: ValidateConfig, folder: Path) -> bool:
    """Whether this rank reads the weights that it draws."""
    drawn, read = model_of(config), model_of(config.model_copy(update={"seed": config.seed + 1}))
    assert not all(torch.equal(a, b) for a, b in zip(drawn.parameters(), read.parameters(), strict=True))
    load_weights(read, folder)
    return all(torch.equal(a, b) for a, b in zip(drawn.parameters(), read.parameters(), strict=True))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_written_and_read_as_by_one_process(pool: Pools, tmp_path: Path, tied: bool) -> None:
    pool(1).run(save, config_of(p=1, tied=tied), tmp_path / "one")
    alone = files_in(tmp_path / "one")
    assert sum(name.endswith(".safetensors") for name in alone) > 1
    cut = {"2": config_of(tied=tied), "2 x 2": config_of("zb-v", tp=2, tied=tied, strategy=SP_VP)}
    for name, config in cut.items():
        pool(config.mesh.world_size).run(save, config, tmp_path / name)
        assert files_in(tmp_path / name) == alone
        assert all(pool(config.mesh.world_size).run(loads, config, tmp_path / "one"))


# Memory


@dataclasses.dataclass
class Alive:
    """What was alive after every action of a stage, and at the end: graphs of pieces, and outputs made for other stages."""

    actions: list[Action]
    graphs: list[int]
    outputs: list[int]


def alive_on_rank(config: ValidateConfig) -> Alive:
    """Counts storages: a piece's graph is alive while any of the tensors it saved is, parameters aside."""
    built, alive, right = model_of(config), Alive([], [], []), pipeline._Stage.act
    weights = {weight.untyped_storage().data_ptr() for weight in built.parameters()}
    saved: dict[pipeline.Piece, list[StorageWeakRef]] = {}
    outputs: list[StorageWeakRef] = []

    def count() -> None:
        alive.graphs.append(sum(not all(ref.expired() for ref in refs) for refs in saved.values()))
        alive.outputs.append(sum(not ref.expired() for ref in outputs))

    def act(self: Any, action: Action) -> None:
        refs = saved.setdefault((action.chunk, action.microbatch), [])

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in weights:
                refs.append(StorageWeakRef(storage))
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            right(self, action)
        if (message := produced(self.schedule, action)) is not None:
            outputs.append(StorageWeakRef(self.local[message].untyped_storage()))
        alive.actions.append(action)
        count()

    with mock.patch.object(pipeline._Stage, "act", act):
        compute_gradients(built, validate.batch_of(config, 0), 1)
    count()
    return alive


@pytest.mark.parametrize("m", [2, 6])
@pytest.mark.parametrize("name", NAMES)
def test_the_graphs_that_live_are_those_the_simulator_counts(pool: Pools, name: str, m: int) -> None:
    config = config_of(name, 2, m)
    schedule, _ = pipeline.plan(config.pipeline, 2, m, True)
    timeline = simulate(schedule, Costs())
    for stage, found in enumerate(pool(2).run(alive_on_rank, config)):
        assert tuple(found.actions) == schedule.actions[stage]
        changes = [{"F": 1, "I": 0}.get(action.kind, -1) for action in found.actions]
        assert found.graphs == [*itertools.accumulate(changes), 0]
        assert max(found.graphs) == timeline.most_alive(stage)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_is_kept_by_nobody(pool: Pools, name: str) -> None:
    """At most two sends are under way to the one neighbour, and one output was just made; all of gpipe's graphs live meanwhile."""
    found = pool(2).run(alive_on_rank, config_of(name, 2, 6))
    for stage in found:
        assert 1 <= max(stage.outputs) <= SENDS_UNDER_WAY + 1
        assert stage.outputs[-1] == 0
    if name == "gpipe":
        assert max(found[0].graphs) == 6


# The ledger


Sent = Counter[tuple[str, str, int, bool]]


def booked(config: ValidateConfig) -> tuple[Sent, set[tuple[str, bool]], set[str]]:
    """What a step books over pp, with the action it is under; over tp, actions and whether backward; the actions done."""
    built, timed = model_of(config), list[pipeline.Timed]()
    with ledger() as entries:
        compute_gradients(built, validate.batch_of(config, 0), 1, timed=timed)
    pp = Counter((entry.action, entry.kind, entry.sent_bytes, entry.backward) for entry in entries if entry.axis == "pp")
    tp = {(entry.action, entry.backward) for entry in entries if entry.axis == "tp"}
    return pp, tp, {f"{done.action.kind} chunk {done.action.chunk} microbatch {done.action.microbatch}" for done in timed}


BORDERS = {"interleaved": lambda p: 2 * p - 1, "zb-v": lambda p: 2 * (p - 1)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("p", "tp", "sp", "seq_len"), [(2, 1, False, 7), (4, 1, False, 7), (2, 2, False, 7), (2, 2, True, 8), (2, 2, True, 7)]
)
def test_a_step_sends_its_closed_form(pool: Pools, name: str, p: int, tp: int, sp: bool, seq_len: int) -> None:
    m, width, item = 3, 32, 8
    config = config_of(name, p, m, tp=tp, seq_len=seq_len, strategy={"sequence_parallel": sp})
    found = [sent for sent, _, _ in pool(p * tp).run(booked, config)]
    size = (-(-seq_len // 2) if sp else seq_len) * width * item
    messages = m * BORDERS.get(name, lambda p: p - 1)(p) * tp
    both = {("", kind, sent, backward): messages for kind, sent in (("send", size), ("receive", 0)) for backward in (False, True)}
    assert {key: count for key, count in sum(found, Counter()).items() if key[1] != "all_reduce"} == both


def test_what_is_booked_inside_of_an_action_says_so(pool: Pools) -> None:
    """Under SP with recomputing, F and I and W all talk; the sums after the pipeline belong to none."""
    for _, under, done in pool(4).run(booked, config_of("zb-h1", 2, 3, tp=2, strategy=SP_VP)):
        assert under == {(name, name[0] != "F") for name in done} | {("", False)}
        assert {name[0] for name in done} == set("FIW")


# Planted bugs: each is put in on every rank, and validate must say FAIL.


def labels_of_the_next_microbatch() -> Any:
    right = step.run_pipeline

    def wrong(model: Any, pieces: Any, finish: Any, **others: Any) -> Any:
        labels = [piece.labels_SB for piece in pieces]
        turned = [piece._replace(labels_SB=labels[(i + 1) % len(labels)]) for i, piece in enumerate(pieces)]
        return right(model, turned, finish, **others)

    return mock.patch.object(step, "run_pipeline", wrong)


def tied_gradient_not_summed() -> Any:
    right = zero.sum_partial

    def wrong(gradients: Any) -> None:
        right([(gradient, axes) for gradient, axes in gradients if all(axis.name != "pp ends" for axis in axes)])

    return mock.patch.object(zero, "sum_partial", wrong)


def tied_weight_counted_twice() -> Any:
    right = optim.counts_here

    def wrong(layout: Layout, mesh: Mesh) -> bool:
        return right(dataclasses.replace(layout, partial=()), mesh)

    return mock.patch.object(optim, "counts_here", wrong)


def clipped_by_its_own_norm() -> Any:
    right = step.global_norm
    return mock.patch.object(step, "global_norm", lambda weights, mesh: right(weights, dataclasses.replace(mesh, pp=Axis("pp"))))


def layer_lost() -> Any:
    right = models.cut_layers

    def wrong(config: ModelConfig, pipeline_config: PipelineConfig, stages: int) -> Any:
        chunks = right(config, pipeline_config, stages)
        if stages == 1:
            return chunks  # the oracle is drawn by a whole model
        longest = max(chunks, key=lambda chunk: len(chunk.layers))
        return tuple(dataclasses.replace(c, layers=c.layers[:-1]) if c is longest else c for c in chunks)

    return mock.patch.object(models, "cut_layers", wrong)


def scaled_by_the_number_of_microbatches() -> Any:
    right = step.run_pipeline

    def wrong(model: Any, pieces: Any, finish: Any, *, backward: bool, **others: Any) -> Any:
        scale = len(pieces) if backward else 1
        return right(model, pieces, lambda x, labels: finish(x, labels) * scale, backward=backward, **others)

    return mock.patch.object(step, "run_pipeline", wrong)


def weight_gradients_dropped() -> Any:
    right = pipeline._Stage.act

    def wrong(self: Any, action: Action) -> None:
        if action.kind == "W" and action.microbatch == 1:
            for late in self.put_off.pop((action.chunk, action.microbatch)):
                self.work.masters.take(late.segment)
        else:
            right(self, action)

    return mock.patch.object(pipeline._Stage, "act", wrong)


BUGS: dict[str, tuple[Callable[[], Any], Row, str]] = {
    "a microbatch judged against the labels of the next": (labels_of_the_next_microbatch, {}, "loss"),
    "the tied head's gradient not summed": (tied_gradient_not_summed, {}, "embed_tokens"),
    "the tied weight counted twice in the norm": (tied_weight_counted_twice, {}, "gradient norm"),
    "clipped by each stage's own norm": (clipped_by_its_own_norm, {"tied": False}, "layers.0."),
    "a layer lost in an uneven split": (layer_lost, {"layers": 5}, "logits"),
    "a gradient scaled by the number of microbatches": (
        scaled_by_the_number_of_microbatches,
        {"schedule": "gpipe"},
        "gradient norm",
    ),
    "weight gradients dropped for one microbatch": (weight_gradients_dropped, {"schedule": "zb-h1"}, "q_proj"),
    "weight gradients dropped for one folded microbatch": (weight_gradients_dropped, {"schedule": "zb-v"}, "q_proj"),
}


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with BUGS[bug][0]():
        return on_rank(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    _, row, named = BUGS[bug]
    config = config_of(**{"layers": 4, "optimizer": OptimizerConfig(clip_norm=0.1), **row})
    clean = pool(2).run(on_rank, config)[0]
    assert clean.passed, f"without the bug: {validate.verdict(clean)}"
    report = pool(2).run(with_bug, bug, config)[0]
    assert not report.passed
    failed = [finding.name for finding in report.findings if not finding.passed]
    assert any(named in name for name in failed), f"{named} is not among {failed[:5]}"
