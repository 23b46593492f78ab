"""What stages of a pipeline say to each other, as data: a schedule's actions with SEND, RECEIVE and EXCHANGE between them.

``communicate`` puts all actions and all messages of all stages in one order, that of a simulation with equal costs, and gives each
stage its own part of it. Both ends of a message read it off the same order, so the first thing of that order that has not happened
yet can always happen, even if a send blocks until it is received. Where two messages cross between the same two stages, the
order has them as one EXCHANGE, in which both are posted together.

``check`` believes none of this: it walks through the lists with sends and receives that block, and names whoever waits in a circle.
``naive`` is what one would write first (receive, compute, send): 1F1B hangs with it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minimind_tron.parallel.schedules import Action, Costs, Kind, Schedule, StuckError, simulate

Stage = int


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """The activation that a chunk sends to the next one, or the gradient it sends to the one before."""

    direction: Literal["activation", "gradient"]
    chunk: int
    microbatch: int

    @property
    def to_chunk(self) -> int:
        """The chunk that reads it."""
        return self.chunk + (1 if self.direction == "activation" else -1)

    def __str__(self) -> str:
        return f"{self.direction} of chunk {self.chunk}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Do an action; what it needs from other stages was received by then."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a stage."""

    message: Message
    peer: Stage


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a message from a stage."""

    message: Message
    peer: Stage


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send and receive, posted together, with the same stage."""

    sent: Message
    received: Message
    peer: Stage


Step = Compute | Send | Receive | Exchange
Program = tuple[tuple[Step, ...], ...]


def produced(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action makes for another stage, if any."""
    if action.kind == "W":
        return None
    message = Message("activation" if action.kind == "F" else "gradient", action.chunk, action.microbatch)
    there = 0 <= message.to_chunk < schedule.placement.chunks
    place = schedule.placement.stage_of
    return message if there and place(message.to_chunk) != place(action.chunk) else None


def consumed(schedule: Schedule, action: Action) -> Message | None:
    """The message from another stage that an action needs, if any."""
    for need in schedule.needs(action):
        if need.chunk != action.chunk and (message := produced(schedule, need)):
            return message
    return None


def communicate(schedule: Schedule) -> Program:
    """Every stage's list: its actions in their order, and the messages in the one order that both ends share.

    Raises: StuckError for a schedule whose actions wait for each other.
    """
    place = schedule.placement.stage_of
    # An action stands where it begins, a message where the action that made it ends: after it, and before who reads it.
    events: list[tuple[float, int, Action | Message]] = []
    for spans in simulate(schedule, Costs()).spans:
        for span in spans:
            events.append((span.start, 1, span.action))
            if message := produced(schedule, span.action):
                events.append((span.end, 0, message))
    events.sort(key=lambda event: event[:2])
    lists: list[list[Step]] = [[] for _ in schedule.actions]
    for _, _, event in events:
        if isinstance(event, Action):
            lists[place(event.chunk)].append(Compute(event))
            continue
        sender, receiver = place(event.chunk), place(event.to_chunk)
        # Crossing messages: neither end did anything else between them.
        theirs, ours = lists[receiver][-1:], lists[sender][-1:]
        if (
            theirs
            and ours
            and isinstance(back := theirs[0], Send)
            and ours[0] == Receive(back.message, receiver)
            and back.peer == sender
        ):
            lists[sender][-1] = Exchange(event, back.message, receiver)
            lists[receiver][-1] = Exchange(back.message, event, sender)
        else:
            lists[sender].append(Send(event, receiver))
            lists[receiver].append(Receive(event, sender))
    return tuple(map(tuple, lists))


def naive(schedule: Schedule) -> Program:
    """Receive what an action needs, act, send what it made: the negative control of ``check``."""

    def steps(stage: Stage, action: Action) -> Iterator[Step]:
        place = schedule.placement.stage_of
        if message := consumed(schedule, action):
            yield Receive(message, place(message.chunk))
        yield Compute(action)
        if message := produced(schedule, action):
            yield Send(message, place(message.to_chunk))

    return tuple(tuple(step for action in actions for step in steps(s, action)) for s, actions in enumerate(schedule.actions))


def halves(step: Step) -> tuple[Message | None, Message | None]:
    """What a step sends and what it receives."""
    match step:
        case Send(message, _):
            return message, None
        case Receive(message, _):
            return None, message
        case Exchange(sent, received, _):
            return sent, received
        case Compute(_):
            return None, None


def check(schedule: Schedule, program: Program) -> None:
    """Prove a program complete and free of deadlock, with sends that block until they are received.

    Raises: StuckError that names the stages and messages that wait in a circle; AssertionError for an action or message that is
    missing, doubled, on the wrong stage or too late for who needs it, and for microbatches out of order.
    """
    _check_complete(schedule, program)
    places = [0] * len(program)
    done: set[Action] = set()
    here: list[set[Message]] = [set() for _ in program]
    while any(place < len(steps) for place, steps in zip(places, program, strict=True)):
        moved = False
        for stage, steps in enumerate(program):
            if places[stage] == len(steps):
                continue
            step = steps[places[stage]]
            if isinstance(step, Compute):
                _check_ready(schedule, stage, step.action, done, here[stage])
                done.add(step.action)
            elif _faces(program, places, step.peer) == _mirrored(step, stage):
                sent, received = halves(step)
                _check_made(stage, sent, done)
                _check_made(step.peer, received, done)
                here[stage].update([received] if received else [])
                here[step.peer].update([sent] if sent else [])
                places[step.peer] += 1
            else:
                continue
            places[stage] += 1
            moved = True
        if not moved:
            raise StuckError(_circle(program, places))


def _faces(program: Program, places: list[int], stage: Stage) -> Step | None:
    return program[stage][places[stage]] if places[stage] < len(program[stage]) else None


def _mirrored(step: Send | Receive | Exchange, stage: Stage) -> Step:
    """The step at the other end."""
    match step:
        case Send(message, _):
            return Receive(message, stage)
        case Receive(message, _):
            return Send(message, stage)
        case Exchange(sent, received, _):
            return Exchange(received, sent, stage)


def _check_complete(schedule: Schedule, program: Program) -> None:
    place, chunks = schedule.placement.stage_of, range(schedule.placement.chunks)
    wanted = {action for actions in schedule.actions for action in actions}
    kinds: set[Kind] = {action.kind for action in wanted}
    assert kinds in ({"F"}, {"F", "B"}, {"F", "I", "W"}), f"a schedule of {kinds}"
    every = {Action(kind, c, b) for kind in kinds for c in chunks for b in range(schedule.microbatches)}
    assert wanted == every, f"the schedule lacks {sorted(every - wanted)} and has {sorted(wanted - every)} too many"
    sent: Counter[tuple[Message, Stage, Stage]] = Counter()
    received: Counter[tuple[Message, Stage, Stage]] = Counter()
    for stage, steps in enumerate(program):
        actions = [step.action for step in steps if isinstance(step, Compute)]
        assert sorted(actions) == sorted(a for a in every if place(a.chunk) == stage), f"stage {stage} lacks or repeats actions"
        in_turn = sorted(actions, key=lambda action: action.microbatch)
        for kind in kinds:
            for chunk in chunks:
                of_one = [a for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert of_one == [a for a in in_turn if (a.kind, a.chunk) == (kind, chunk)], (
                    f"{kind} of chunk {chunk}: out of order"
                )
        for step in steps:
            if not isinstance(step, Compute):
                out, into = halves(step)
                sent.update([(out, stage, step.peer)] if out else [])
                received.update([(into, step.peer, stage)] if into else [])
    messages = [message for action in every if (message := produced(schedule, action))]
    right = Counter((message, place(message.chunk), place(message.to_chunk)) for message in messages)
    assert sent == right, f"messages lacking {list(right - sent)}, too many {list(sent - right)}"
    assert received == right, f"receives lacking {list(right - received)}, too many {list(received - right)}"


def _check_ready(schedule: Schedule, stage: Stage, action: Action, done: set[Action], here: set[Message]) -> None:
    for need in schedule.needs(action):
        assert need in done, f"stage {stage} does {action} before {need}"
    message = consumed(schedule, action)
    assert message is None or message in here, f"stage {stage} does {action} without {message}"


def _check_made(stage: Stage, message: Message | None, done: set[Action]) -> None:
    if message is not None:
        kinds: tuple[Kind, ...] = ("F",) if message.direction == "activation" else ("B", "I")
        made = any(Action(kind, message.chunk, message.microbatch) in done for kind in kinds)
        assert made, f"stage {stage} sends the {message} before it is made"


def _circle(program: Program, places: list[int]) -> str:
    """Follow who waits for whom until a stage comes up twice."""
    stage = next(s for s, steps in enumerate(program) if places[s] < len(steps))
    seen: list[Stage] = []
    while stage not in seen:
        seen.append(stage)
        step = _faces(program, places, stage)
        if step is None or isinstance(step, Compute):
            return f"stage {seen[-2]} waits for stage {stage}, which has ended or goes on without it"
        stage = step.peer
    return "; ".join(_waits(s, _faces(program, places, s)) for s in seen[seen.index(stage) :])


def _waits(stage: Stage, step: Step | None) -> str:
    match step:
        case Send(message, peer):
            return f"stage {stage} sends the {message} to stage {peer}"
        case Receive(message, peer):
            return f"stage {stage} waits for the {message} from stage {peer}"
        case Exchange(sent, received, peer):
            return f"stage {stage} exchanges the {sent} for the {received} with stage {peer}"
    return f"stage {stage} waits for nobody"
