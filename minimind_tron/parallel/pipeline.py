"""Pipeline parallelism (PP): the layers are cut over stages, and one loop runs any schedule, with one stage too.

``cut_layers`` says which layers are in which chunk; ``run`` goes through a stage's program step by step. What is not obvious:

- Messages are posted in the order of the program, which ``messages.check`` proves safe even for sends that block; a receive that
  comes right after an action is posted before it, so that the message travels while the stage computes. A message carries its
  direction, chunk and microbatch in its tag.
- A chunk is run segment by segment, forward and backward; see ``segments.py`` for what each keeps in between. A chunk's output,
  once it is sent, is kept by nobody. So a stage holds what the segments keep of the microbatches between their F and their B (or
  W), as many as the simulator says, and messages under way, at most two to each neighbour.
- Between neighbouring chunks on one stage nothing is sent.
- As soon as a segment's gradients of a microbatch are complete they are taken from the weights and summed; see ``zero.py``.
- I runs a chunk's backward while ``linear.putting_off`` collects the weight gradients, W computes them. Everything else (norms,
  biases) comes with I and is laid aside until then.

The hidden state that travels is this rank's: under SP a shard of the sequence, so that no byte is sent twice.

Cost: a microbatch sends S*B*D forward and S*B*D backward over each border between stages, divided by tp under SP.
Source: see ``schedules.py``. Freeing the sent output follows Narayanan et al., arXiv 2104.04473; there its data is replaced by an
empty tensor, here the graph is entered without it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from minimind_tron.collectives import Parcel, Pending, start_exchange, start_receive, start_send
from minimind_tron.config import ModelConfig
from minimind_tron.ledger import booked_under
from minimind_tron.mesh import Axis
from minimind_tron.parallel.linear import WeightWork, putting_off
from minimind_tron.parallel.messages import Compute, Exchange, Message, Program, Receive, Send, communicate, consumed, halves
from minimind_tron.parallel.schedules import Action, Schedule, build, forward_only, placement_of
from minimind_tron.parallel.segments import AnyVisit, Segment
from minimind_tron.parallel.zero import Masters
from minimind_tron.topology import PipelineConfig

# More sends than this to one stage, not yet received, and the sender waits: what it sent would pile up in its memory.
SENDS_UNDER_WAY = 2


@dataclass(frozen=True)
class Chunk:
    """A run of consecutive layers; the first chunk embeds, the last one has the final norm, the head and the loss."""

    number: int
    layers: range
    first: bool
    last: bool


def layer_costs(config: ModelConfig) -> tuple[float, float, float]:
    """Estimated time of the embedding, of a block and of the final norm with head and loss, in multiplications a token."""
    D, H, N, K = config.hidden_size, config.head_width, config.num_attention_heads, config.num_key_value_heads
    return float(D), float(2 * D * N * H + 2 * D * K * H + 3 * D * config.ffn_size), float(D + D * config.vocab_size)


def balanced(config: ModelConfig, chunks: int) -> list[int]:
    """How many layers each chunk has so that the slowest is as fast as it can be; every chunk has one at least.

    Blocks cost the same, so giving them out one by one, each where it makes the smallest sum, is best.
    """
    embedding, block, head = layer_costs(config)
    costs, layers = [block] * chunks, [1] * chunks
    costs[0] += embedding
    costs[-1] += head
    for _ in range(config.num_hidden_layers - chunks):
        cheapest = min(range(chunks), key=lambda i: costs[i])
        costs[cheapest] += block
        layers[cheapest] += 1
    return layers


def cut_layers(config: ModelConfig, pipeline: PipelineConfig, stages: int) -> tuple[Chunk, ...]:
    """All chunks of a model, in its order; every layer is in exactly one of them."""
    count = stages * pipeline.chunks_a_stage
    sizes = pipeline.layers or balanced(config, count)
    assert (len(sizes), sum(sizes)) == (count, config.num_hidden_layers), f"{sizes}: no {count} parts of all layers"
    starts = [sum(sizes[:i]) for i in range(count)]
    return tuple(Chunk(i, range(starts[i], starts[i] + sizes[i]), i == 0, i == count - 1) for i in range(count))


def describe(config: ModelConfig, pipeline: PipelineConfig, stages: int) -> str:
    """The schedule and which layers are where, in words; empty where one stage has the whole model as one chunk."""
    chunks = cut_layers(config, pipeline, stages)
    place = placement_of(pipeline.pp_schedule, stages, pipeline.chunks_a_stage).stage_of
    parts = [f"{c.layers[0]}-{c.layers[-1]} on stage {place(c.number)}" for c in chunks]
    return f"{pipeline.pp_schedule}; layers {', '.join(parts)}" if len(chunks) > 1 else ""


@lru_cache(maxsize=64)
def plan(pipeline: PipelineConfig, stages: int, microbatches: int, backward: bool) -> tuple[Schedule, Program]:
    """The schedule that a config asks for, or the forward half for evaluation, and its program."""
    name, virtual = pipeline.pp_schedule, pipeline.chunks_a_stage
    if backward:
        schedule = build(name, stages, virtual, microbatches)
    else:
        schedule = forward_only(placement_of(name, stages, virtual), microbatches)
    return schedule, communicate(schedule)


@dataclass(frozen=True)
class Timed:
    """An action as it ran: wall clock of ``time.perf_counter``, and the time it kept its core busy."""

    action: Action
    start_s: float
    end_s: float
    cpu_s: float


@dataclass(frozen=True)
class Work:
    """What a pipeline runs: the segments of each chunk, on the model's view of each microbatch; the last one makes its loss.

    ``shape`` is that of the hidden states of a microbatch, as this rank holds them between chunks.
    """

    segments: Callable[[int], Sequence[Segment]]
    view: Callable[[int], Any]
    masters: Masters
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


Piece = tuple[int, int]  # chunk, microbatch


@dataclass(frozen=True)
class PutOff:
    """A segment's weight gradients that are not computed yet, and those that are: they are taken together."""

    segment: Segment
    works: list[WeightWork]
    aside: list[tuple[nn.Parameter, Tensor]]

    def catch_up(self) -> None:
        """Compute what was put off; every gradient is with its weight then."""
        for weight, gradient in self.aside:
            weight.grad = gradient
        for work in self.works:
            work()


def _laid_aside(segment: Segment) -> list[tuple[nn.Parameter, Tensor]]:
    """The gradients that a segment's weights have by now, taken from them: those of another microbatch may come before W."""
    found: list[tuple[nn.Parameter, Tensor]] = []
    for weight in segment.weights:
        if weight.grad is not None:
            found.append((weight, weight.grad))
            weight.grad = None
    return found


class _Stage:
    """One stage at work: what waits to be used, and what is under way."""

    def __init__(self, schedule: Schedule, axis: Axis, work: Work, timed: list[Timed] | None) -> None:
        self.schedule, self.axis, self.work, self.timed = schedule, axis, work, timed
        self.trains = any(action.kind != "F" for action in schedule.actions[axis.rank])
        # Messages that are here: received, made and not yet sent, or between two chunks of this stage.
        self.local: dict[Message, Tensor] = {}
        self.receiving: dict[Message, Pending] = {}
        self.sending: dict[int, list[Pending]] = {}
        self.visits: dict[Piece, list[AnyVisit]] = {}
        self.put_off: dict[Piece, list[PutOff]] = {}
        self.results: dict[int, Tensor] = {}

    # Messages

    def parcel(self, message: Message) -> Parcel:
        chunks, backward = self.schedule.placement.chunks, message.direction == "gradient"
        tag = (message.microbatch * chunks + message.chunk) * 2 + backward
        return Parcel(self.work.shape(message.microbatch), self.work.dtype, self.work.device, tag, backward)

    def post(self, step: Send | Receive | Exchange) -> None:
        sent, received = halves(step)
        if sent and received:
            out, into = start_exchange(self.local.pop(sent), self.parcel(sent), self.parcel(received), self.axis, step.peer)
        elif sent:
            out = start_send(self.local.pop(sent), self.parcel(sent), self.axis, step.peer)
        elif received:
            into = start_receive(self.parcel(received), self.axis, step.peer)
        if received:
            self.receiving[received] = into
        if sent:
            sends = self.sending.setdefault(step.peer, [])
            sends.append(out)
            while len(sends) > SENDS_UNDER_WAY:
                sends.pop(0).wait()

    def await_needed(self, action: Action) -> None:
        message = consumed(self.schedule, action)
        if message in self.receiving:
            self.local[message] = self.receiving.pop(message).wait()

    def await_sent(self) -> None:
        for sends in self.sending.values():
            for pending in sends:
                pending.wait()

    # Actions

    def act(self, action: Action) -> None:
        piece = action.chunk, action.microbatch
        if action.kind == "F":
            self.forward(piece)
        elif action.kind == "W":
            for late in self.put_off.pop(piece):
                late.catch_up()
                self.work.masters.take(late.segment)
        elif action.kind == "I":
            self.put_off[piece] = []
            for segment, run in self.backwards(piece):
                with putting_off() as works:
                    run()
                self.put_off[piece].append(PutOff(segment, works, _laid_aside(segment)))
        else:
            for segment, run in self.backwards(piece):
                run()
                self.work.masters.take(segment)

    def forward(self, piece: Piece) -> None:
        chunk, microbatch = piece
        x = self.local.pop(Message("activation", chunk - 1, microbatch)) if chunk else None
        view, segments = self.work.view(microbatch), self.work.segments(chunk)
        visits = []
        for segment, then in zip(segments, [*segments[1:], None], strict=True):
            with self.work.masters.use(segment, then):
                if self.trains:
                    visits.append(segment.visit(segment, x, view))
                    x = visits[-1].forward()
                else:
                    x = segment.run(x, view)
        assert x is not None, f"chunk {chunk} has no segment"
        if self.trains:
            self.visits[piece] = visits
        if chunk == self.schedule.placement.chunks - 1:
            self.results[microbatch] = x
        else:
            self.local[Message("activation", chunk, microbatch)] = x

    def backwards(self, piece: Piece) -> Iterator[tuple[Segment, Callable[[], None]]]:
        """Each segment, the last one first, and its backward, to be run before the next is asked for."""
        chunk, microbatch = piece
        last = chunk == self.schedule.placement.chunks - 1
        dy = torch.ones_like(self.results[microbatch]) if last else self.local.pop(Message("gradient", chunk + 1, microbatch))
        visits = self.visits.pop(piece)

        def run() -> None:
            nonlocal dy
            with self.work.masters.use(visit.segment, visits[-1].segment if visits else None):
                dx = visit.backward(dy)
            dy = dy if dx is None else dx

        while visits:
            visit = visits.pop()
            yield visit.segment, run
        if chunk:
            self.local[Message("gradient", chunk, microbatch)] = dy

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        # With one thread its own clock leaves out what the backend's threads do; with more, the work is in all of them.
        busy = time.thread_time if torch.get_num_threads() == 1 else time.process_time
        start_s, start_busy_s = time.perf_counter(), busy()
        with booked_under(f"{action.kind} chunk {action.chunk} microbatch {action.microbatch}", action.kind != "F"):
            yield
        if self.timed is not None:
            self.timed.append(Timed(action, start_s, time.perf_counter(), busy() - start_busy_s))


def run(schedule: Schedule, program: Program, axis: Axis, work: Work, timed: list[Timed] | None = None) -> dict[int, Tensor]:
    """Run this stage's part of a program; returns, by microbatch, what the last chunk made, and on other stages nothing.

    What becomes of the gradients is the masters' affair. ``timed`` takes when each action ran.
    """
    stage = _Stage(schedule, axis, work, timed)
    steps, posted = program[axis.rank], 0
    for place, step in enumerate(steps):
        if not isinstance(step, Compute):
            if place >= posted:
                stage.post(step)
            continue
        posted = place + 1
        while posted < len(steps) and isinstance(early := steps[posted], Receive):
            stage.post(early)
            posted += 1
        stage.await_needed(step.action)
        with stage.timing(step.action):
            stage.act(step.action)
    stage.await_sent()
    return stage.results
