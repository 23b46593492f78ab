"""Pipeline parallelism (PP): the layers are cut over stages, and one loop runs any schedule, with one stage too.

``cut_layers`` says which layers are in which chunk; ``run`` goes through a stage's program step by step. What is not obvious:

- Messages are posted in the order of the program, which ``messages.check`` proves safe even for sends that block; a receive that
  comes right after an action is posted before it, so that the message travels while the stage computes. A message carries its
  direction, chunk and microbatch in its tag.
- A chunk's output, once it is sent, is kept by nobody: backward begins at the edge of the graph it came from, and no chunk's last
  operation keeps its result. So a stage holds the graphs of the microbatches between their F and their B (or W), as many as the
  simulator says, and messages under way, at most two to each neighbour.
- Between neighbouring chunks on one stage nothing is sent; the graph is cut there as well, so that each chunk has its own backward.
- I runs a chunk's backward while ``linear.putting_off`` collects the weight gradients, W computes them. Everything else (norms,
  biases) is summed in I.

The hidden state that travels is this rank's: under SP a shard of the sequence, so that no byte is sent twice.

Cost: a microbatch sends S*B*D forward and S*B*D backward over each border between stages, divided by tp under SP.
Source: see ``schedules.py``. Freeing the sent output follows Narayanan et al., arXiv 2104.04473; there its data is replaced by an
empty tensor, here the graph is entered without it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minimind_tron.collectives import Parcel, Pending, start_exchange, start_receive, start_send
from minimind_tron.config import ModelConfig
from minimind_tron.ledger import booked_under
from minimind_tron.mesh import Axis
from minimind_tron.parallel.linear import WeightWork, putting_off
from minimind_tron.parallel.messages import Compute, Exchange, Message, Program, Receive, Send, communicate, consumed, halves
from minimind_tron.parallel.schedules import Action, Schedule, build, forward_only, placement_of
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
    """What a pipeline runs: ``forward(chunk, x, microbatch)`` is a chunk's output, or the last one's loss; x is None for the first.

    ``shape`` is that of the hidden states of a microbatch, as this rank holds them between chunks.
    """

    forward: Callable[[int, Tensor | None, int], Tensor]
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


Piece = tuple[int, int]  # chunk, microbatch


class _Stage:
    """One stage at work: what waits to be used, and what is under way."""

    def __init__(self, schedule: Schedule, axis: Axis, work: Work, timed: list[Timed] | None) -> None:
        self.schedule, self.axis, self.work, self.timed = schedule, axis, work, timed
        self.trains = any(action.kind != "F" for action in schedule.actions[axis.rank])
        # Messages that are here: received, made and not yet sent, or between two chunks of this stage.
        self.local: dict[Message, Tensor] = {}
        self.receiving: dict[Message, Pending] = {}
        self.sending: dict[int, list[Pending]] = {}
        self.inputs: dict[Piece, Tensor] = {}
        self.edges: dict[Piece, GradientEdge] = {}
        self.put_off: dict[Piece, list[WeightWork]] = {}
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
            for work in self.put_off.pop(piece):
                work()
        elif action.kind == "I":
            with putting_off() as self.put_off[piece]:
                self.backward(piece)
        else:
            self.backward(piece)

    def forward(self, piece: Piece) -> None:
        chunk, microbatch = piece
        x = None
        if chunk:
            x = self.local.pop(Message("activation", chunk - 1, microbatch))
            if self.trains:
                x = self.inputs[piece] = x.detach().requires_grad_()
        y = self.work.forward(chunk, x, microbatch)
        if self.trains:
            self.edges[piece] = get_gradient_edge(y)
        if chunk == self.schedule.placement.chunks - 1:
            self.results[microbatch] = y.detach()
        else:
            self.local[Message("activation", chunk, microbatch)] = y.detach()

    def backward(self, piece: Piece) -> None:
        chunk, microbatch = piece
        last = chunk == self.schedule.placement.chunks - 1
        dy = torch.ones_like(self.results[microbatch]) if last else self.local.pop(Message("gradient", chunk + 1, microbatch))
        torch.autograd.backward((self.edges.pop(piece),), (dy,))
        if chunk:
            dx = self.inputs.pop(piece).grad
            assert dx is not None, f"chunk {chunk} has no gradient for its input"
            self.local[Message("gradient", chunk, microbatch)] = dx

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

    Gradients are added to those the parameters have. ``timed`` takes when each action ran.
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
