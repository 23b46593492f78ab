"""Pipeline schedules as data: who does which piece of which microbatch, in what order. Pure; no process is needed to read one.

The model is cut by depth into chunks, numbered from the embedding. A pipeline of p stages holds v chunks a stage:

- *looped* placement: chunk c is on stage c mod p (with v = 1, one chunk a stage);
- *folded* placement, for ZB-V: chunks 0 .. p-1 go down the stages and chunks p .. 2p-1 come back up, so that stage 0 holds the
  first chunk and the last, and the middle of the model needs no message.

A microbatch goes forward (F) through the chunks in order and backward through them in reverse. The backward is one action (B), or
two: the input gradient (I), which the chunk before waits for, and the weight gradient (W), which nobody waits for, so that it can
fill gaps. In every schedule each chunk's F, B, I and W run in the order of the microbatches: gradients are added up in that order.

With f, b the times of F and B, of equal chunks, messages free, and all stages waiting for the slowest at the end of a step:

| schedule | bubble, share of p x makespan | most activations alive on stage s, in whole stages |
| --- | --- | --- |
| gpipe | (p-1) / (m+p-1) | m |
| 1f1b | (p-1) / (m+p-1) | min(m, p-s) |
| interleaved | (p-1) / (v m+p-1) where p divides m | about (2(p-s-1) + (v-1) p + 1) / v |
| zb-h1 | (p-1) / (3m+p-1) for m >= p, where F, I, W cost the same | p |
| zb-v | (p-1) / (6m+p-1) for m >= 2p-1, where F, I, W cost the same | p |

Source: Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., arXiv 2006.09503 (1F1B) and 2104.04473 (interleaved); Qi et al.,
arXiv 2401.10241 (ZB-H1) and 2405.15362 (ZB-V). Different here: GPipe's backward takes the microbatches in order, not in reverse;
interleaved takes any number of microbatches (its last group is longer, where p does not divide it); ZB-V takes fewer than 2p-1.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast, get_args

from minimind_tron.topology import ScheduleName

Kind = Literal["F", "B", "I", "W"]
NAMES = get_args(ScheduleName)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one stage: F forward, B backward, or I input gradient and W weight gradient, of a microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Placement:
    """Which stage holds which chunk of the model."""

    stages: int = 1
    virtual: int = 1
    folded: bool = False

    @property
    def chunks(self) -> int:
        """Chunks in all."""
        return self.stages * self.virtual

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a chunk."""
        lap, place = divmod(chunk, self.stages)
        return self.stages - 1 - place if self.folded and lap % 2 else place

    def chunks_of(self, stage: int) -> list[int]:
        """The chunks of a stage, in the order of the model."""
        return [chunk for chunk in range(self.chunks) if self.stage_of(chunk) == stage]


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in order."""

    name: str
    placement: Placement
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be over before this one begins; B of one chunk is what I and B of the chunk before wait for."""
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind == "F":
            return [Action("F", chunk - 1, microbatch)] if chunk else []
        if kind == "W":
            return [Action("I", chunk, microbatch)]
        own = [Action("F", chunk, microbatch)]
        return own if chunk == self.placement.chunks - 1 else [*own, Action(kind, chunk + 1, microbatch)]


def placement_of(name: str, stages: int, virtual: int) -> Placement:
    """Where a schedule puts the chunks."""
    return Placement(stages, virtual, folded=name == "zb-v")


def build(name: str, stages: int, virtual: int, microbatches: int) -> Schedule:
    """The schedule of a name.

    Raises: AssertionError for a name or a number of virtual stages that it does not have; the config refuses those first.
    """
    assert name in NAMES, f"{name} is none of {NAMES}"
    assert virtual == 2 if name == "zb-v" else virtual == 1 or name == "interleaved", f"{name} with {virtual} chunks a stage"
    order = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zb-h1": _zb_h1, "zb-v": _zb_v}
    placement = placement_of(name, stages, virtual)
    if name == "interleaved":
        lists = [_interleaved(placement, stage, microbatches) for stage in range(stages)]
    else:
        lists = [order[name](stages, stage, microbatches) for stage in range(stages)]
    return Schedule(name, placement, microbatches, tuple(map(tuple, lists)))


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Evaluation: every microbatch through every chunk, no backward."""
    steps = [(chunk + microbatch, chunk, microbatch) for chunk in range(placement.chunks) for microbatch in range(microbatches)]
    lists: list[list[Action]] = [[] for _ in range(placement.stages)]
    for _, chunk, microbatch in sorted(steps):
        lists[placement.stage_of(chunk)].append(Action("F", chunk, microbatch))
    return Schedule("forward only", placement, microbatches, tuple(map(tuple, lists)))


class _Order:
    """A list of actions in the making; each kind of each chunk takes the microbatches in order and stops after the last."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches, self.actions = microbatches, list[Action]()
        self._next: dict[tuple[Kind, int], int] = {}

    def done(self, kind: Kind, chunk: int) -> int:
        """How many microbatches of a kind the list has."""
        return self._next.get((kind, chunk), 0)

    def add(self, chunk: int, kinds: str, times: int = 1) -> None:
        """The next action of each kind, some times over."""
        for kind in cast(Sequence[Kind], kinds * times):
            if (microbatch := self.done(kind, chunk)) < self.microbatches:
                self._next[kind, chunk] = microbatch + 1
                self.actions.append(Action(kind, chunk, microbatch))


def _gpipe(stages: int, stage: int, microbatches: int) -> list[Action]:
    """All forward, then all backward."""
    order = _Order(microbatches)
    order.add(stage, "F", microbatches)
    order.add(stage, "B", microbatches)
    return order.actions


def _one_forward_one_backward(stages: int, stage: int, microbatches: int) -> list[Action]:
    """As many forwards as it takes the first backward to come back, then one of each in turn."""
    order = _Order(microbatches)
    order.add(stage, "F", stages - 1 - stage)
    order.add(stage, "FB", microbatches)
    return order.actions


def _zb_h1(stages: int, stage: int, microbatches: int) -> list[Action]:
    """1F1B whose weight gradients lag behind by as many microbatches as the stage is deep, to fill the gap at the end."""
    order = _Order(microbatches)
    order.add(stage, "F", stages - 1 - stage)
    order.add(stage, "FI", stage)
    order.add(stage, "FIW", microbatches)
    order.add(stage, "W", stage)
    return order.actions


def _zb_v(stages: int, stage: int, microbatches: int) -> list[Action]:
    """Down and up the stages; forwards fill the time until the first backward, weight gradients the time after the last."""
    order, down, up = _Order(microbatches), stage, 2 * stages - 1 - stage
    below = stages - stage  # stages from this one to the fold
    order.add(down, "F", 2 * below - 1)
    for _ in range(stage):
        order.add(up, "F")
        order.add(down, "F")
    order.add(up, "FIW", below)
    while order.done("F", down) < microbatches or order.done("F", up) < microbatches:
        order.add(down, "FIW")
        order.add(up, "FIW")
    for _ in range(stage):
        order.add(down, "I")
        order.add(up, "I")
    order.add(down, "IW", below)
    for chunk, kind in ((up, "I"), (down, "I"), (up, "W"), (down, "W")):
        order.add(chunk, kind, microbatches)
    return order.actions


def _interleaved(placement: Placement, stage: int, microbatches: int) -> list[Action]:
    """Groups of p microbatches through one chunk of a stage after the other; then forwards and backwards in turn, as in 1F1B.

    The last group takes the rest as well: shorter groups would leave the stages waiting for a group to come round.
    """
    p, chunks = placement.stages, placement.chunks_of(stage)
    groups = max(1, microbatches // p)
    spans = [range(*bound) for bound in pairwise([*range(0, groups * p, p), microbatches])]
    forward = [(chunk, microbatch) for span in spans for chunk in chunks for microbatch in span]
    backward = [(chunk, microbatch) for span in spans for chunk in reversed(chunks) for microbatch in span]
    position = {piece: i for i, piece in enumerate(forward)}
    actions, begun, least = list[Action](), 0, 0
    for chunk, microbatch in backward:
        # On the last stage a backward needs its own forward, and one more forward fills each slot of the steady state; a stage
        # further up is as many forwards ahead as it takes them to go down and their gradients to come back.
        least = max(least + 1, position[chunk, microbatch] + 1)
        wanted = min(len(forward), least + 2 * (p - 1 - stage))
        actions += [Action("F", *piece) for piece in forward[begun:wanted]]
        actions.append(Action("B", chunk, microbatch))
        begun = max(begun, wanted)
    return actions


# Simulation

Cost = Callable[[int, Action], float]


@dataclass(frozen=True)
class Costs:
    """Times of a whole stage's forward, input gradient and weight gradient, and of a message; a chunk takes its share."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    message: float = 0.0

    def of(self, kind: Kind) -> float:
        """The time of a whole stage's action."""
        both = self.input_gradient + self.weight_gradient
        return {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient, "B": both}[kind]

    def share_of(self, placement: Placement) -> Cost:
        """The times of a chunk's actions."""
        return lambda _, action: self.of(action.kind) / placement.virtual


@dataclass(frozen=True)
class Span:
    """When an action ran, and the action it waited for last where it did not begin as soon as its stage was free."""

    action: Action
    start: float
    end: float
    waited_for: Action | None


@dataclass(frozen=True)
class Timeline:
    """The spans of every stage, in order; time begins at 0, and every stage waits for the slowest."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The end of the last action of any stage."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which nothing is computed."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1 - busy / (len(self.spans) * self.makespan)

    def alive(self, stage: int) -> list[tuple[float, int]]:
        """How many activations of chunks a stage keeps, as (time, number from then on): from F's start to the end of B or W."""
        changes = {"F": 1, "B": -1, "I": 0, "W": -1}
        count, steps = 0, [(0.0, 0)]
        for span in self.spans[stage]:
            change = changes[span.action.kind]
            if change:
                count += change
                steps.append((span.start if change > 0 else span.end, count))
        return steps

    def most_alive(self, stage: int) -> int:
        """The most activations of chunks that a stage keeps at any time."""
        return max(count for _, count in self.alive(stage))


class StuckError(AssertionError):
    """Stages that wait for each other for ever."""


def simulate(schedule: Schedule, cost: Costs | Cost, message: float | None = None) -> Timeline:
    """When everything happens: an action begins when its stage is free and what it needs is there.

    ``cost`` are the times of a stage's actions, of which each chunk takes the v-th part, or a function of stage and action. A
    message between stages takes ``message`` (0, or that of the costs) and keeps nobody busy.
    Raises: StuckError for a schedule whose actions wait for each other.
    """
    placement = schedule.placement
    if isinstance(cost, Costs):
        message = cost.message if message is None else message
        cost = cost.share_of(placement)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}
    for stage, action in in_order(schedule):
        free = spans[stage][-1].end if spans[stage] else 0.0
        away = message or 0.0
        ready = [(ends[need] + (away if placement.stage_of(need.chunk) != stage else 0.0), need) for need in schedule.needs(action)]
        latest, cause = max(ready, default=(0.0, None), key=lambda pair: pair[0])
        start = max(free, latest)
        ends[action] = start + cost(stage, action)
        spans[stage].append(Span(action, start, ends[action], cause if latest > free else None))
    return Timeline(schedule, tuple(map(tuple, spans)))


def in_order(schedule: Schedule) -> Iterable[tuple[int, Action]]:
    """The actions of all stages, each after those it needs.

    Raises: StuckError.
    """
    done: set[Action] = set()
    places = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while places[stage] < len(actions) and all(need in done for need in schedule.needs(actions[places[stage]])):
                action = actions[places[stage]]
                places[stage], moved = places[stage] + 1, True
                done.add(action)
                yield stage, action
    left = [(s, actions[i]) for s, (i, actions) in enumerate(zip(places, schedule.actions, strict=True)) if i < len(actions)]
    if left:
        lacks = [(s, action, [need for need in schedule.needs(action) if need not in done]) for s, action in left]
        raise StuckError("; ".join(f"stage {s} waits in {action} for {missing}" for s, action, missing in lacks))
