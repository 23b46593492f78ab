"""Faults of data parallelism, ZeRO and dropout, put in on every rank: each must be caught, also where the loss looks sound."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from minimind_tron import model as models
from minimind_tron import step
from minimind_tron.collectives import Pending
from minimind_tron.commands import validate
from minimind_tron.dropout import Tokens
from minimind_tron.judge import Report
from minimind_tron.layout import LaidOut, layout_of
from minimind_tron.mesh import Mesh
from minimind_tron.optim import build_adamw, global_norm
from minimind_tron.parallel import zero as zeros
from minimind_tron.parallel.segments import Segment
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.parallel.zero import Bucket, CutGradients, CutStates, Masters
from minimind_tron.run_config import ValidateConfig
from minimind_tron.step import train_step
from minimind_tron.tokens import Batch
from tests.covering import Row
from tests.meshes import mesh_of, random_batch
from tests.pool import RankError
from tests.proving import Pools, one_thread
from tests.zero_cases import OTHERS, STAGES, UNEVEN, build, config_of, on_rank_uneven

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
