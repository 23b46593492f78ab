"""What a segment keeps from its forward to its backward changes no bit: gradients, bytes, collectives, calls, planted bugs."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from measurements.storages import Storages
from minimind_tron import model as models
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.dropout import Noise, Place, Tokens, drop
from minimind_tron.judge import Report
from minimind_tron.ledger import ledger
from minimind_tron.model import Model, initialise
from minimind_tron.parallel import pipeline, segments, tensor
from minimind_tron.parallel.linear import multiply
from minimind_tron.parallel.segments import AnyVisit, Segment, Visit, VisitAgain, VisitKept, kept
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import compute_gradients, evaluate
from minimind_tron.topology import MeshConfig, PipelineConfig, Recompute, StrategyConfig
from tests.covering import Row
from tests.meshes import STRATEGIES, mesh_of, randn, random_batch, tiny
from tests.pool import RankError
from tests.proving import Pools, on_rank, one_thread

NOISE = Noise(0.1, seed=42, step=7)
AGAIN: tuple[Recompute, ...] = ("block", "selective")
B, S = 2, 8


def build(
    recompute: Recompute,
    strategy: StrategyConfig | None = None,
    mesh: MeshConfig | None = None,
    schedule: PipelineConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Model:
    """A tiny model on this worker's mesh."""
    switches = (strategy or StrategyConfig()).model_copy(update={"recompute": recompute})
    built = Model(tiny(**changes), mesh_of(mesh or MeshConfig()), switches, schedule, dtype=dtype)
    initialise(built, seed=7, spread=0.1)
    return built


# Bit for bit


Case = tuple[MeshConfig, StrategyConfig, PipelineConfig]
Named = dict[str, Tensor]


def case_of(strategy: StrategyConfig | None = None, schedule: Row | None = None, **degrees: int) -> Case:
    return MeshConfig(**degrees), strategy or StrategyConfig(), PipelineConfig(**(schedule or {}))


CASES: dict[str, Case] = {
    "alone": case_of(),
    **{f"tp 2, {name}": case_of(strategy, tp_size=2) for name, strategy in STRATEGIES.items()},
    "tp 2, sp, vocab cut": case_of(StrategyConfig(sequence_parallel=True, vocab_parallel=True), tp_size=2),
    **{f"cp 2, {way}": case_of(StrategyConfig(cp_comm_type=way), cp_size=2) for way in ("ring", "all_gather", "a2a")},
    "cp 2, keys kept": case_of(StrategyConfig(cp_comm_type="all_gather", cp_regather=False), cp_size=2),
    **{f"pp 2, {name}": case_of(None, {"pp_schedule": name}, pp_size=2) for name in ("1f1b", "zb-h1")},
    "dp 2, everything cut": case_of(StrategyConfig(zero=3), dp_size=2),
    "tp 2 x pp 2, sp, zb-h1": case_of(STRATEGIES["sp-async"], {"pp_schedule": "zb-h1"}, tp_size=2, pp_size=2),
}


def gradients(recompute: Recompute, case: Case, dtype: torch.dtype, noise: Noise | None, **changes: object) -> tuple[Named, float]:
    """What this rank keeps of every raw gradient, and the loss, of four samples whose length must be padded."""
    mesh, strategy, schedule = case
    built = build(recompute, strategy, mesh, schedule, dtype, **changes)
    loss, _ = compute_gradients(built, random_batch(4, S - 1, built.config.vocab_size), 1, noise)
    return {name: gradient.clone() for name, (gradient, _) in built.masters.gradients().items()}, loss


def differing(one: tuple[Named, float], other: tuple[Named, float]) -> list[str]:
    assert one[0].keys() == other[0].keys()
    return [name for name, found in one[0].items() if not torch.equal(found, other[0][name])] + ["loss"] * (one[1] != other[1])


def differing_on_rank(case: Case, dtype: torch.dtype) -> tuple[int, dict[str, list[str]]]:
    """How many gradients this rank has, and which differ from those of graphs that are kept; then without dropout."""
    with one_thread():
        plain, bare = (gradients("none", case, dtype, noise, attention_bias=True) for noise in (NOISE, None))
        found = {how: differing(gradients(how, case, dtype, NOISE, attention_bias=True), plain) for how in AGAIN}
    return len(plain[0]), {**found, "no dropout": differing(bare, plain)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_are_bit_equal_to_those_of_kept_graphs(pool: Pools, case: Case, dtype: torch.dtype) -> None:
    for count, found in pool(case[0].world_size).run(differing_on_rank, case, dtype):
        assert (found["block"], found["selective"]) == ([], [])
        assert count > 10
        # The comparison sees what dropout does: every gradient is another without it.
        assert len(found["no dropout"]) == count + 1


# Bytes


def alive_after_forward(
    recompute: Recompute, dtype: torch.dtype, noise: Noise | None, strategy: StrategyConfig, mesh: MeshConfig, layers: int
) -> int:
    """Bytes that live between the forward and the backward of a microbatch."""
    found, right = list[int](), pipeline._Stage.act
    built = build(recompute, strategy, mesh, dtype=dtype, num_hidden_layers=layers)
    with Storages() as storages:

        def act(self: Any, action: Any) -> None:
            right(self, action)
            # A thread of gloo's may drop the tensors of a finished collective a moment after it was waited for.
            time.sleep(0.05)
            found.append(storages.now)

        with mock.patch.object(pipeline._Stage, "act", act):
            compute_gradients(built, random_batch(B, S, built.config.vocab_size), B, noise)
    assert len(found) == 2, "a forward and a backward"
    return found[0]


def bytes_a_block(recompute: Recompute, *setting: Any) -> int:
    """What a block adds, the second as much as the third."""
    with one_thread():
        one, two, three = (alive_after_forward(recompute, *setting, layers) for layers in (1, 2, 3))
    assert two - one == three - two
    return two - one


def numbers_kept(recompute: Recompute, strategy: StrategyConfig, mesh: MeshConfig) -> int:
    """The closed form: the input; the results of q, k, v, gate and up; what is made of o and down by the row's collective."""
    config, tp = tiny(), mesh.tp_size
    tokens = S // mesh.cp_size * B
    hidden = tokens * config.hidden_size // (tp if strategy.sequence_parallel else 1)
    if recompute == "block":
        return hidden
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) // tp
    return 3 * hidden + tokens * (heads * config.head_width + 2 * config.ffn_size // tp)


KEPT: dict[str, tuple[StrategyConfig, MeshConfig]] = {
    "alone": (StrategyConfig(), MeshConfig()),
    **{f"tp 2, {name}": (strategy, MeshConfig(tp_size=2)) for name, strategy in STRATEGIES.items()},
    **{f"cp 2, {way}": (StrategyConfig(cp_comm_type=way), MeshConfig(cp_size=2)) for way in ("ring", "all_gather", "a2a")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("strategy", "mesh"), KEPT.values(), ids=KEPT.keys())
def test_a_block_keeps_its_closed_form(pool: Pools, strategy: StrategyConfig, mesh: MeshConfig, dtype: torch.dtype) -> None:
    """Dropout adds nothing to it: masks are drawn again."""
    setting = dtype, NOISE, strategy, mesh
    found = {how: pool(mesh.world_size).run(bytes_a_block, how, *setting) for how in ("none", *AGAIN)}
    for how in AGAIN:
        assert found[how] == [numbers_kept(how, strategy, mesh) * dtype.itemsize] * mesh.world_size, how
    for none, block, selective in zip(found["none"], found["block"], found["selective"], strict=True):
        assert 2 * block < selective
        assert 2 * selective < none


def test_graphs_keep_masks_and_second_forwards_do_not() -> None:
    """A mask is a byte an element."""
    mask = S * B * tiny().hidden_size
    for how, more in (("none", mask), ("block", 0), ("selective", 0)):
        without, with_masks = (bytes_a_block(how, torch.float32, noise, StrategyConfig(), MeshConfig()) for noise in (None, NOISE))
        assert with_masks - without == more, how


def results_left(copied: bool) -> list[tuple[int, int, int]]:
    """Of every block's visit: results kept, how many live before its backward, and how many after it."""
    found: list[tuple[int, int, int]] = []
    right, refs, held = VisitKept.backward, dict[int, list[StorageWeakRef]](), []

    def alive(visit: AnyVisit) -> int:
        return sum(not ref.expired() for ref in refs[id(visit)])

    def forward(self: VisitKept) -> Tensor:
        y = right_forward(self)
        refs[id(self)] = [StorageWeakRef(result.untyped_storage()) for result in self.results]
        held.extend(self.results if copied else [])
        return y

    def backward(self: VisitKept, dy: Tensor) -> Tensor | None:
        before = alive(self)
        dx = right(self, dy)
        found.append((len(refs[id(self)]), before, alive(self)))
        return dx

    right_forward = VisitKept.forward
    with mock.patch.multiple(VisitKept, forward=forward, backward=backward):
        compute_gradients(build("selective"), random_batch(4, S, 37), 2, NOISE)
    return found


def test_results_are_free_when_their_block_is_through() -> None:
    assert results_left(copied=False) == [(7, 7, 0)] * 2 * 2
    assert results_left(copied=True) == [(7, 7, 7)] * 2 * 2, "what is held is seen"


@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_after_a_step_nothing_but_gradients_is_left(recompute: Recompute) -> None:
    built = build(recompute)
    with Storages() as storages:
        compute_gradients(built, random_batch(4, S, 37), 2, NOISE)
    assert storages.now == 4 * built.config.num_parameters


# Collectives


Sent = Counter[tuple[str, bool, int]]


def booked(recompute: Recompute, strategy: StrategyConfig, mesh: MeshConfig, layers: int) -> Sent:
    """What a microbatch sends while something is done, in the backward or not, in bytes."""
    built = build(recompute, strategy, mesh, num_hidden_layers=layers)
    with ledger() as entries:
        compute_gradients(built, random_batch(B, S, 37), B, NOISE)
    return Counter((entry.kind, entry.backward, entry.sent_bytes) for entry in entries if entry.action)


def sent_again(recompute: Recompute, strategy: StrategyConfig, mesh: MeshConfig) -> Sent:
    """What the second forward of a block sends."""
    config, tp, cp, item = tiny(), mesh.tp_size, mesh.cp_size, 4
    tokens, more = S // cp * B, Sent()
    hidden = tokens * config.hidden_size * item
    if tp > 1 and strategy.sequence_parallel:
        more["all_gather", True, hidden * (tp - 1) // tp] = 2 if recompute == "block" or not strategy.sp_recompute else 0
        more["reduce_scatter", True, hidden * (tp - 1) // tp] = 2 if recompute == "block" else 0
    elif tp > 1:
        more["all_reduce", True, 2 * hidden * (tp - 1) // tp] = 2 if recompute == "block" else 0
    if cp > 1:
        n, k, H = config.num_attention_heads // tp, config.num_key_value_heads // tp, config.head_width
        blocks = 2 * tokens * k * H * item
        if strategy.cp_comm_type == "ring":
            more["shift", True, blocks] = cp - 1
        elif strategy.cp_comm_type == "all_gather":
            more["all_gather", True, (cp - 1) * blocks] += 1
        else:
            more["all_to_all", True, tokens * (n + 2 * math.lcm(k, cp)) * H * item * (cp - 1) // cp] += 1
            more["all_to_all", True, tokens * n * H * item * (cp - 1) // cp] += 1
    return +more


SENDING: dict[str, tuple[StrategyConfig, MeshConfig]] = {
    **KEPT,
    "cp 2, keys kept": (StrategyConfig(cp_comm_type="all_gather", cp_regather=False), MeshConfig(cp_size=2)),
    "tp 2 x cp 2, sp": (STRATEGIES["sp"], MeshConfig(tp_size=2, cp_size=2)),
}


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize(("strategy", "mesh"), SENDING.values(), ids=SENDING.keys())
def test_a_second_forward_sends_its_closed_form(
    pool: Pools, strategy: StrategyConfig, mesh: MeshConfig, recompute: Recompute
) -> None:
    """Block: what the first one sent. Selective: attention's, and gathers that nobody makes in the backward anyway."""
    for layers in (1, 2):
        once, again = (pool(mesh.world_size).run(booked, how, strategy, mesh, layers) for how in ("none", recompute))
        expected = Counter({what: count * layers for what, count in sent_again(recompute, strategy, mesh).items()})
        for before, after in zip(once, again, strict=True):
            assert after - before == expected
            assert before - after == Sent()


# Calls


def calls(recompute: Recompute, mesh: MeshConfig) -> Counter[tuple[str, int, bool]]:
    """How often the parts of this stage ran, by the microbatch's first sample and whether a graph was made."""
    found = Counter[tuple[str, int, bool]]()

    def counted(name: str) -> Callable[..., Tensor]:
        right = getattr(Model, name)

        def run(self: Model, *given: Any) -> Tensor:
            found[name + str(given[0]) * (name == "_block"), given[-1].piece.first, torch.is_grad_enabled()] += 1
            return right(self, *given)

        return run

    with mock.patch.multiple(Model, **{name: counted(name) for name in ("_embed", "_block", "_finish")}):
        compute_gradients(build(recompute, mesh=mesh), random_batch(6, S, 37), 2, NOISE)
    return found


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_a_block_runs_twice_a_microbatch_and_the_ends_run_once(pool: Pools, recompute: Recompute, pp: int) -> None:
    how_often = (True,) if recompute == "none" else (False, True)
    expected = Counter((f"_block{i}", first, graph) for i in (0, 1) for first in (0, 2, 4) for graph in how_often)
    expected += Counter((end, first, True) for end in ("_embed", "_finish") for first in (0, 2, 4))
    assert sum(pool(pp).run(calls, recompute, MeshConfig(pp_size=pp)), Counter()) == expected


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("block", 2), ("selective", 1)])
def test_selective_makes_no_product_with_weights_again(recompute: Recompute, times: int) -> None:
    built = build(recompute)
    with mock.patch.object(F, "linear", wraps=F.linear) as products:
        compute_gradients(built, random_batch(6, S, 37), 2, NOISE)
    assert products.call_count == 3 * (2 * 7 * times + 1)


def test_evaluation_keeps_nothing() -> None:
    built = build("selective")
    with mock.patch.object(segments, "_keeping", side_effect=AssertionError("kept")):
        assert evaluate(built, [random_batch(2, S, 37)], 2) > 0
        with pytest.raises(AssertionError, match="kept"):
            compute_gradients(built, random_batch(2, S, 37), 2)


# One visit


def segment_of(run: Callable[[Tensor | None, Any], Tensor], visit: type[AnyVisit]) -> Segment:
    return Segment("toy", [], run, visit)


@pytest.mark.parametrize("visit", [Visit, VisitAgain, VisitKept])
def test_a_visit_gives_an_output_without_a_graph_and_the_gradients_of_both(visit: type[AnyVisit]) -> None:
    weight, x, dy = (randn(3, 3, seed=seed) for seed in range(3))
    weight.requires_grad_()
    visited = visit(segment_of(lambda x, scale: multiply(x, weight).square() * scale, visit), x, 2.0)
    y = visited.forward()
    assert not y.requires_grad
    assert torch.equal(y, (x @ weight.T).square() * 2)
    dx = visited.backward(dy)
    wanted = 4 * (x @ weight.detach().T) * dy
    assert dx is not None
    assert torch.allclose(dx, wanted @ weight.detach())
    assert weight.grad is not None
    assert torch.allclose(weight.grad, wanted.T @ x)
    assert not x.requires_grad
    assert x.grad is None


@pytest.mark.parametrize("visit", [Visit, VisitAgain, VisitKept])
def test_the_embedding_has_no_input(visit: type[AnyVisit]) -> None:
    weight = randn(3, 3, seed=0).requires_grad_()
    visited = visit(segment_of(lambda _, __: weight * 2, visit), None, None)
    visited.forward()
    assert visited.backward(torch.ones(3, 3, dtype=torch.float64)) is None
    assert weight.grad is not None
    assert weight.grad.eq(2).all()


def test_what_is_kept_is_computed_once_and_outside_each_time() -> None:
    counted = Counter[str]()

    def square(x: Tensor) -> Tensor:
        counted["square"] += 1
        return x.detach().square()

    def run(x: Tensor, _: Any) -> Tensor:
        return x * kept(lambda: square(x))

    for visit, times in ((Visit, 1), (VisitAgain, 2), (VisitKept, 1)):
        counted.clear()
        visited = visit(segment_of(run, visit), randn(2, seed=0), None)
        visited.forward()
        visited.backward(randn(2, seed=1))
        assert counted["square"] == times


def asking(*times: int) -> Segment:
    """A segment that asks for so many results in each of its runs."""
    left = list(times)

    def run(x: Tensor, _: Any) -> Tensor:
        for _ in range(left.pop(0)):
            x = x + kept(lambda: torch.ones(2, dtype=torch.float64))
        return x

    return segment_of(run, VisitKept)


def test_a_second_forward_that_leaves_results_is_refused() -> None:
    visit = VisitKept(asking(3, 1), randn(2, seed=0), None)
    visit.forward()
    with pytest.raises(AssertionError, match="left 2 results"):
        visit.backward(randn(2, seed=1))
    assert segments._results is None


def test_a_second_forward_that_asks_for_more_is_refused() -> None:
    visit = VisitKept(asking(1, 2), randn(2, seed=0), None)
    visit.forward()
    with pytest.raises(AssertionError, match="asks for more results"):
        visit.backward(randn(2, seed=1))
    assert segments._results is None


def test_keeping_inside_of_keeping_is_refused() -> None:
    inner = VisitKept(asking(1, 1, 1), randn(2, seed=0), None)
    outer = VisitKept(segment_of(lambda x, _: x + inner.forward(), VisitKept), randn(2, seed=0), None)
    with pytest.raises(AssertionError, match="kept already"):
        outer.forward()
    assert segments._results is None
    inner.forward()
    replaying = VisitKept(segment_of(lambda x, _: x + inner.again(x), VisitKept), randn(2, seed=0), None)
    with pytest.raises(AssertionError, match=r"kept already|replayed already"):
        replaying.forward()
    replaying.results = []
    with pytest.raises(AssertionError, match="replayed already"):
        replaying.backward(randn(2, seed=1))
    assert segments._results is None
    assert segments._fills is False


def test_an_error_inside_leaves_nothing_behind() -> None:
    def run(x: Tensor, _: Any) -> Tensor:
        kept(lambda: x)
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        VisitKept(segment_of(run, VisitKept), randn(2, seed=0), None).forward()
    assert (segments._results, segments._fills) == (None, False)


# Planted bugs


def config_of(recompute: Recompute, mesh: Row | None = None) -> ValidateConfig:
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16
        ),
        mesh=MeshConfig(**(mesh or {})),
        strategy=StrategyConfig(recompute=recompute),
        batch=BatchConfig(seq_len=S, micro_batch_size=1, global_batch_size=2),
        optimizer_steps=0,
        dropout=0.1,
    )


def another_mask_in_the_second_forward() -> Any:
    """As a generator would give it whose state nobody restores."""

    def wrong(x: Tensor, noise: Noise | None, tokens: Tokens, layer: int, place: Place) -> Tensor:
        second = place == "attention" and torch.is_grad_enabled()
        return drop(x, noise and Noise(noise.rate, noise.seed + second, noise.step), tokens, layer, place)

    return mock.patch.object(models, "drop", wrong)


def replayed_with(one: int, other: int) -> Callable[[], Any]:
    """Two kept results changed about."""

    def planted() -> Any:
        right = segments._replaying

        def wrong(results: list[Any]) -> Any:
            results[one], results[other] = results[other], results[one]
            return right(results)

        return mock.patch.object(segments, "_replaying", wrong)

    return planted


def second_forward_left_out_of_the_graph() -> Any:
    """The block's weights get no gradient, its input that of the residual."""
    return mock.patch.object(VisitAgain, "again", lambda self, x: x + (self.segment.run(x, self.view) - x).detach())


Q, K, V, OUT, GATE, UP, DOWN = range(7)
# What puts it in; what is recomputed, where; a gradient that is wrong then, among others.
BUGS: dict[str, tuple[Callable[[], Any], Recompute, Row, str]] = {
    "another mask in the second forward, block": (another_mask_in_the_second_forward, "block", {}, "o_proj"),
    "another mask in the second forward, selective": (another_mask_in_the_second_forward, "selective", {"tp_size": 2}, "o_proj"),
    "k and v changed about": (replayed_with(K, V), "selective", {}, "q_proj"),
    "o and down changed about": (replayed_with(OUT, DOWN), "selective", {}, "gate_proj"),
    "gate and up changed about": (replayed_with(GATE, UP), "selective", {"tp_size": 2}, "down_proj"),
    "the second forward left out of the graph": (second_forward_left_out_of_the_graph, "block", {}, "up_proj"),
}


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with BUGS[bug][0]():
        return on_rank(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    """All of them leave logits and loss as they are."""
    _, recompute, mesh, named = BUGS[bug]
    config = config_of(recompute, mesh)
    clean = pool(config.mesh.world_size).run(on_rank, config)[0]
    assert clean.passed, f"without the bug: {validate.verdict(clean)}"
    report = pool(config.mesh.world_size).run(with_bug, bug, config)[0]
    failed = {finding.kind: [] for finding in report.findings if not finding.passed}
    for finding in report.findings:
        if not finding.passed:
            failed[finding.kind].append(finding.name)
    assert set(failed) <= {"gradient", "gradients", "norm"}
    assert any(named in name for name in failed.get("gradient", [])), f"{named} is not among {failed}"


@contextmanager
def o_is_forgotten(*, when_filled: bool, when_replayed: bool) -> Iterator[None]:
    """What comes after q, k and v, or before the last three, is not kept, or not asked for."""

    def wrong(compute: Callable[[], Any]) -> Any:
        forgotten = when_filled if segments._fills else when_replayed
        is_o = segments._results is not None and len(segments._results) == (
            OUT if segments._fills else DOWN - OUT + (not when_filled)
        )
        return compute() if forgotten and is_o else kept(compute)

    with mock.patch.object(tensor, "kept", wrong):
        yield


def forgetting(when_filled: bool, when_replayed: bool) -> tuple[list[str], int, Sent]:
    """Gradients that differ, bytes a block keeps, and what a block sends, on two ranks of tp."""
    case, mesh = CASES["tp 2, tp"], MeshConfig(tp_size=2)
    plain = gradients("none", case, torch.float32, NOISE)
    with o_is_forgotten(when_filled=when_filled, when_replayed=when_replayed):
        found = differing(gradients("selective", case, torch.float32, NOISE), plain)
        size = bytes_a_block("selective", torch.float32, NOISE, case[1], mesh)
        two, one = (booked("selective", case[1], mesh, layers) for layers in (2, 1))
    return found, size, two - one


def test_a_visit_that_never_keeps_o_sends_its_sum_again(pool: Pools) -> None:
    """No gradient shows it: bytes and the ledger do."""
    hidden = S * B * tiny().hidden_size
    for (right, kept_bytes, sent), (wrong, less, more) in zip(
        pool(2).run(forgetting, False, False), pool(2).run(forgetting, True, True), strict=True
    ):
        assert right == wrong == []
        assert kept_bytes == 4 * numbers_kept("selective", StrategyConfig(), MeshConfig(tp_size=2))
        assert kept_bytes - less == 4 * hidden
        assert more - sent == Counter({("all_reduce", True, 4 * hidden): 1})


def forgotten_once(when_filled: bool, when_replayed: bool, ffn: int) -> None:
    case = case_of()
    with o_is_forgotten(when_filled=when_filled, when_replayed=when_replayed):
        gradients("selective", case, torch.float32, NOISE, intermediate_size=ffn)


@pytest.mark.parametrize(
    ("filled", "replayed", "ffn", "message"),
    [
        (True, False, 16, "asks for more results"),
        (True, False, 24, "must match the size"),
        (False, True, 16, "left 1 results"),
    ],
)
def test_a_visit_that_forgets_o_once_is_refused(pool: Pools, filled: bool, replayed: bool, ffn: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool(1).run(forgotten_once, filled, replayed, ffn)
