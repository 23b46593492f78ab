"""ZeRO: what a rank keeps of every parameter between steps, and when gradients are summed and weights are gathered.

The ranks of the data axis (dp x cp) share all parameters, so each may keep a part only. A *master* is a parameter as the optimizer
sees it: in the wider of float32 and the dtype, with the gradient of the whole global batch, and cut like the optimizer's states.

| stage | cut | gradients are summed | weights are gathered |
| --- | --- | --- | --- |
| 0 ``Masters`` | nothing | all-reduce, once a step | never |
| 1 ``CutStates`` | masters and optimizer states | reduce-scatter, once a step | after the update |
| 2 ``CutGradients`` | gradients too | reduce-scatter, once a microbatch | after the update |
| 3 ``CutParameters`` | weights too | reduce-scatter, once a microbatch | before each forward and backward |

All of it goes segment by segment, and a collective runs beside the next segment's work: in 0 and 1 the sum of a segment starts when
its last microbatch is through, in 2 and 3 after each; in 3 the next segment's weights are under way while one is computed with.
Sums over other axes (tp, the ends of a pipeline) come after the last backward, over what is kept: they are linear, so it does not
matter which comes first, and later there is less to send.

Every tensor is cut on dim 0 of its local shard, in pieces that may be uneven or empty, so what is kept has a ``Layout``.

Cost, of a step with m microbatches on n ranks, N numbers of w bytes a weight and g a gradient, N' with the padding of pieces; a
matrix that is embedding and head on one stage is used twice, and counts twice where a microbatch is named:

| stage | bytes a rank sends |
| --- | --- |
| 0 | 2 (n-1)/n N g |
| 1 | (n-1)/n N' (g + w) |
| 2 | (n-1)/n N' (m g + w) |
| 3 | (n-1)/n N' m (g + 2 w) |

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054. There parameters are flattened and cut anywhere; here a piece is whole rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minimind_tron.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from minimind_tron.layout import Cut, LaidOut, Layout, fill_from, free, layout_of, make_room, wider
from minimind_tron.mesh import Axis
from minimind_tron.parallel.data import Pieces, buckets, flat, split, sum_partial
from minimind_tron.parallel.segments import Segment
from minimind_tron.topology import ZeroStage

# Sums under way beside the backward: each holds a bucket of gradients.
SUMS_UNDER_WAY = 1


@dataclass(eq=False)
class Kept:
    """What a rank keeps of a parameter: the ``weight`` is computed with, the ``master`` updated; the weight comes from ``stored``.

    ``stored`` has the weight's dtype; where that is wide enough, it is the master's own memory. A ``passing`` master has memory
    for the time of an update only.
    """

    weight: LaidOut
    master: LaidOut
    stored: Tensor
    passing: bool

    def gradient(self) -> Tensor:
        """The weight's gradient so far, or zeros where it had no work on this rank: the other ranks wait for its part."""
        return torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad

    def lift(self) -> None:
        """Give a passing master its values."""
        if self.passing:
            make_room(self.master)
            self.master.data.copy_(self.stored)

    def store(self) -> None:
        """Round an updated master to what the weight comes from."""
        if self.master.dtype != self.weight.dtype:
            self.stored.copy_(self.master.data)
        if self.passing:
            free(self.master)


@dataclass(eq=False)
class Bucket:
    """Parameters that travel together, and how their pieces lie in it."""

    kept: list[Kept]
    pieces: Pieces


class Masters:
    """ZeRO 0: every rank of the data axis keeps everything; a master is the weight itself where its dtype is wide enough.

    ``dtype`` is that of masters which are kept beside narrower weights (mixed precision); without it the masters of narrow weights
    live for the time of an update, and each update is rounded into the weights.
    """

    def __init__(
        self, weights: Mapping[str, LaidOut], segments: Sequence[Segment], axis: Axis, dtype: torch.dtype | None = None
    ) -> None:
        self.axis, self.segments, self.mixed = axis, segments, dtype is not None
        self.kept = {name: self._keep(weight, dtype) for name, weight in weights.items()}
        self._of = {id(kept.weight): kept for kept in self.kept.values()}
        # A weight that two segments use is summed with the first one, whose backward is the last.
        homes = {id(weight): segment for segment in reversed(segments) for weight in segment.weights}
        self.homes = {segment: self._bucket(w for w in segment.weights if homes[id(w)] is segment) for segment in segments}
        self._sums: dict[int, Tensor] = {}
        self._left: dict[int, int] = {}
        self._pending: list[tuple[Bucket, Pending]] = []

    # What is kept

    def _layout(self, weight: LaidOut) -> Layout:
        """What a master is to the whole."""
        return layout_of(weight)

    def _stored(self, weight: LaidOut, layout: Layout) -> Tensor:
        """Where a weight comes from."""
        return layout.kept(weight.data)

    def _keep(self, weight: LaidOut, dtype: torch.dtype | None) -> Kept:
        layout = self._layout(weight)
        stored, wide = self._stored(weight, layout), dtype or wider(weight.dtype)
        if wide != weight.dtype:
            master = LaidOut(torch.empty(stored.shape, dtype=wide, device=weight.device))
        else:
            master = weight if layout == layout_of(weight) else LaidOut(stored)
        master.whole = layout
        kept = Kept(weight, master, stored, passing=dtype is None and wide != weight.dtype)
        if kept.passing:
            free(master)
        return kept

    def _bucket(self, weights: Iterable[LaidOut]) -> list[Bucket]:
        """The weights as buckets, without those whose gradients are no parts over the axis."""
        found = []
        for run in buckets(weight for weight in weights if self._travels(layout_of(weight))):
            kept = [self._of[id(weight)] for weight in run]
            found.append(Bucket(kept, Pieces([layout_of(each.master) for each in kept], self.axis)))
        return found

    def _travels(self, layout: Layout) -> bool:
        return self.axis in layout.partial

    def parameters(self) -> list[LaidOut]:
        """What the optimizer updates."""
        return [kept.master for kept in self.kept.values()]

    def gradients(self) -> dict[str, tuple[Tensor, Layout]]:
        """The gradients of the global batch, by name, as far as this rank keeps them."""
        masters = {name: kept.master for name, kept in self.kept.items()}
        return {name: (master.grad, layout_of(master)) for name, master in masters.items() if master.grad is not None}

    def values(self) -> dict[str, tuple[Tensor, Layout]]:
        """The parameters, by name, as far as this rank keeps them: masters that are kept beside weights, or else the weights."""
        found = {name: kept.master if self.mixed else kept.weight for name, kept in self.kept.items()}
        return {name: (value.detach(), layout_of(value)) for name, value in found.items()}

    @torch.no_grad()
    def fill(self, name: str, region: Tensor) -> None:
        """Write this rank's region of a whole parameter into what is kept of it; nothing is sent.

        Shapes: that of ``layout.region``. Cost: one whole local tensor.
        """
        kept = self.kept[name]
        layout = layout_of(kept.weight)
        local = torch.zeros(layout.local_shape, dtype=kept.master.dtype, device=kept.weight.device)
        fill_from(local, layout, region)
        self._fill_weight(kept, local)
        mine = layout_of(kept.master).kept(local)
        kept.stored.copy_(mine)
        if self.mixed:
            kept.master.data.copy_(mine)

    def _fill_weight(self, kept: Kept, local: Tensor) -> None:
        kept.weight.data.copy_(local)

    # Around the backward

    def begin(self, passes: int) -> None:
        """Forget all gradients; so many microbatches will come."""
        self._sums, self._left, self._pending = {}, {}, []
        for kept in self.kept.values():
            kept.weight.grad = kept.master.grad = None
        for segment in self.segments:
            for weight in segment.weights:
                self._left[id(weight)] = self._left.get(id(weight), 0) + passes

    @contextmanager
    def use(self, segment: Segment, then: Segment | None) -> Iterator[None]:
        """Compute with a segment's weights, and soon with those of the next one."""
        yield

    def take(self, segment: Segment) -> None:
        """A microbatch's gradients of a segment are complete: add them up."""
        for weight in segment.weights:
            kept = self._of[id(weight)]
            if id(weight) in self._sums:
                self._sums[id(weight)].add_(kept.gradient())
            else:
                self._sums[id(weight)] = kept.gradient().to(wider(weight.dtype))
            self._taken(weight)
            if not self._left[id(weight)] and not self._travels(layout_of(weight)):
                kept.master.grad = self._sums.pop(id(weight))
        for bucket in self.homes[segment]:
            if not any(self._left[id(kept.weight)] for kept in bucket.kept):
                self._start(bucket, [self._sums.pop(id(kept.weight)) for kept in bucket.kept])

    def _taken(self, weight: LaidOut) -> None:
        weight.grad = None
        self._left[id(weight)] -= 1

    def _start(self, bucket: Bucket, gradients: list[Tensor]) -> None:
        self._pending.append((bucket, self._start_sum(bucket, gradients)))

    def _start_sum(self, bucket: Bucket, gradients: list[Tensor]) -> Pending:
        return start_all_reduce(flat(gradients, wider(gradients[0].dtype)), self.axis)

    def _deliver(self, bucket: Bucket, summed: Tensor) -> None:
        masters = [kept.master for kept in bucket.kept]
        for master, gradient in zip(masters, split(summed, masters), strict=True):
            master.grad = gradient

    def _settle(self, under_way: int) -> None:
        while len(self._pending) > under_way:
            bucket, pending = self._pending.pop(0)
            self._deliver(bucket, pending.wait())

    @torch.no_grad()
    def finish(self) -> None:
        """Every gradient is that of the global batch when this returns; runs once, after the last backward of a step.

        Cost: what is still under way, and the sums over other axes.
        """
        assert not any(self._left.values()), "a microbatch's gradients were not taken"
        self._settle(0)
        found = self.gradients().values()
        sum_partial([(gradient, tuple(axis for axis in layout.partial if axis != self.axis)) for gradient, layout in found])

    # Around the update

    def lift(self) -> None:
        """Give masters that are not kept between steps their values, for an update."""
        for kept in self.kept.values():
            kept.lift()

    def publish(self) -> None:
        """Bring updated masters into the weights of every rank."""
        for kept in self.kept.values():
            kept.store()


class CutStates(Masters):
    """ZeRO 1: masters and optimizer states are cut over the data axis."""

    def _layout(self, weight: LaidOut) -> Layout:
        whole = layout_of(weight)
        others = tuple(axis for axis in whole.partial if axis != self.axis)
        return replace(whole, partial=others, shard=Cut(0, self.axis, self.axis.size))

    def _travels(self, layout: Layout) -> bool:
        return True

    def _start_sum(self, bucket: Bucket, gradients: list[Tensor]) -> Pending:
        return start_reduce_scatter(bucket.pieces.pack(gradients, wider(gradients[0].dtype)), self.axis)

    def _deliver(self, bucket: Bucket, summed: Tensor) -> None:
        for kept, gradient in zip(bucket.kept, bucket.pieces.unpack_kept(summed), strict=True):
            master = kept.master
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def _start_gather(self, bucket: Bucket) -> Pending:
        stored = [kept.stored for kept in bucket.kept]
        return start_all_gather(bucket.pieces.pack_kept(stored, stored[0].dtype), self.axis)

    def _gathered(self, bucket: Bucket, pending: Pending) -> None:
        bucket.pieces.unpack_into(pending.wait(), [kept.weight.data for kept in bucket.kept])

    def publish(self) -> None:
        """Bring updated masters into the weights of every rank; the next bucket is under way while one is written."""
        super().publish()
        homes = [bucket for segment in self.segments for bucket in self.homes[segment]]
        coming = [self._start_gather(bucket) for bucket in homes[:1]]
        for i, bucket in enumerate(homes):
            coming += [self._start_gather(after) for after in homes[i + 1 : i + 2]]
            self._gathered(bucket, coming.pop(0))


class CutGradients(CutStates):
    """ZeRO 2: a microbatch's gradients are summed into a shard as soon as a segment has them, and their memory is free again."""

    def __init__(
        self, weights: Mapping[str, LaidOut], segments: Sequence[Segment], axis: Axis, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, segments, axis, dtype)
        self.uses = {segment: self._bucket(segment.weights) for segment in segments}

    @torch.no_grad()
    def take(self, segment: Segment) -> None:
        """A microbatch's gradients of a segment are complete: sum them over the ranks beside what comes next."""
        for bucket in self.uses[segment]:
            self._start(bucket, [kept.gradient() for kept in bucket.kept])
        for weight in segment.weights:
            self._taken(weight)
        self._settle(SUMS_UNDER_WAY)


class CutParameters(CutGradients):
    """ZeRO 3: weights are gathered before a segment's forward and again before its backward, and their memory is freed after it.

    The model's parameters must have been born ``passing``.
    """

    def __init__(
        self, weights: Mapping[str, LaidOut], segments: Sequence[Segment], axis: Axis, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, segments, axis, dtype)
        self._coming: dict[Segment, list[Pending]] = {}

    def _stored(self, weight: LaidOut, layout: Layout) -> Tensor:
        begin, end = layout.rows
        return torch.empty((end - begin, *weight.shape[1:]), dtype=weight.dtype, device=weight.device)

    def values(self) -> dict[str, tuple[Tensor, Layout]]:
        """The parameters, by name, as far as this rank keeps them."""
        found = {name: kept.master.detach() if self.mixed else kept.stored for name, kept in self.kept.items()}
        return {name: (value, layout_of(self.kept[name].master)) for name, value in found.items()}

    def _fill_weight(self, kept: Kept, local: Tensor) -> None:
        """A weight that is not there is not filled."""

    def _ask_for(self, segment: Segment) -> None:
        if segment not in self._coming:
            self._coming[segment] = [self._start_gather(bucket) for bucket in self.uses[segment]]

    @contextmanager
    def use(self, segment: Segment, then: Segment | None) -> Iterator[None]:
        """Compute with a segment's gathered weights; those of the next one are under way meanwhile."""
        self._ask_for(segment)
        for bucket, pending in zip(self.uses[segment], self._coming.pop(segment), strict=True):
            for kept in bucket.kept:
                make_room(kept.weight)
            self._gathered(bucket, pending)
        if then is not None:
            self._ask_for(then)
        try:
            yield
        finally:
            for weight in segment.weights:
                free(weight)

    def publish(self) -> None:
        """Round updated masters to what weights will be gathered from; nothing is sent."""
        Masters.publish(self)


STAGES: dict[ZeroStage, type[Masters]] = {0: Masters, 1: CutStates, 2: CutGradients, 3: CutParameters}
