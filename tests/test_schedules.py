"""Schedules and their messages, read without a process: complete, free of deadlock, as fast and as small as is said of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from minimind_tron.parallel.messages import (
    Compute,
    Exchange,
    Message,
    Program,
    Receive,
    Send,
    Step,
    check,
    communicate,
    halves,
    naive,
)
from minimind_tron.parallel.schedules import (
    NAMES,
    Action,
    Costs,
    Placement,
    Schedule,
    Span,
    StuckError,
    Timeline,
    build,
    forward_only,
    in_order,
    placement_of,
    simulate,
)

STAGES, MICROBATCHES = range(1, 9), range(1, 17)
EQUAL = Costs()
RATIOS = {
    "B=2F": EQUAL,
    "B=F": Costs(1, 0.5, 0.5),
    "I=0.7, W=1.3": Costs(1, 0.7, 1.3),
    "I=1.3, W=0.7": Costs(1, 1.3, 0.7),
    "F=2": Costs(2, 1, 1.5),
}
Steps = list[Step]

build_once = cache(build)


def virtuals(name: str) -> Sequence[int]:
    return {"interleaved": (1, 2, 3, 4), "zb-v": (2,)}.get(name, (1,))


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Every p, v and m of a schedule."""
    return ((p, v, m) for p in STAGES for v in virtuals(name) for m in MICROBATCHES)


@cache
def simulated(name: str, p: int, v: int, m: int, costs: Costs = EQUAL) -> Timeline:
    return simulate(build_once(name, p, v, m), costs)


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    build_once.cache_clear()
    simulated.cache_clear()


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


# Complete and free of deadlock


@pytest.mark.parametrize("name", NAMES)
def test_every_program_is_complete_and_free_of_deadlock(name: str) -> None:
    for p, v, m in sizes(name):
        schedule = build_once(name, p, v, m)
        check(schedule, communicate(schedule))


@pytest.mark.parametrize("name", NAMES)
def test_every_evaluation_is_complete_and_free_of_deadlock(name: str) -> None:
    for p, v, m in sizes(name):
        schedule = forward_only(placement_of(name, p, v), m)
        check(schedule, communicate(schedule))
        assert {action.kind for actions in schedule.actions for action in actions} == {"F"}


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 2), ("gpipe", 2), ("zb-h1", 2), ("zb-v", 1), ("zb-v", 3), ("dapple", 1)])
def test_a_schedule_that_is_none_is_refused(name: str, virtual: int) -> None:
    with pytest.raises(AssertionError, match=name):
        build(name, 2, virtual, 4)


# Placement


def test_looped_placement_goes_round() -> None:
    looped = Placement(3, 2)
    assert [looped.stage_of(chunk) for chunk in range(looped.chunks)] == [0, 1, 2, 0, 1, 2]
    assert [looped.chunks_of(stage) for stage in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_folded_placement_comes_back_up() -> None:
    folded = placement_of("zb-v", 3, 2)
    assert [folded.stage_of(chunk) for chunk in range(folded.chunks)] == [0, 1, 2, 2, 1, 0]
    assert [folded.chunks_of(stage) for stage in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_only_zb_v_folds() -> None:
    assert {name for name in NAMES if placement_of(name, 2, 2).folded} == {"zb-v"}


# Bubbles


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_whatever_the_costs(name: str, ratio: str) -> None:
    for p, v, m in sizes(name):
        assert simulated(name, p, v, m, RATIOS[ratio]).bubble == close((p - 1) / (m + p - 1)), (p, m)


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_bubble_of_interleaved_where_p_divides_m(ratio: str) -> None:
    for p, v, m in sizes("interleaved"):
        if m % p == 0:
            assert simulated("interleaved", p, v, m, RATIOS[ratio]).bubble == close((p - 1) / (v * m + p - 1)), (p, v, m)


def test_the_bubble_of_zb_h1_at_equal_costs() -> None:
    for p, v, m in sizes("zb-h1"):
        if m >= p:
            assert simulated("zb-h1", p, v, m).bubble == close((p - 1) / (3 * m + p - 1)), (p, m)


def test_the_bubble_of_zb_v_at_equal_costs_is_all_before_the_first_and_after_the_last_action() -> None:
    for p, v, m in sizes("zb-v"):
        if m >= 2 * p - 1:
            timeline = simulated("zb-v", p, v, m)
            assert timeline.bubble == close((p - 1) / (6 * m + p - 1)), (p, m)
            for spans in timeline.spans:
                assert spans[-1].end - spans[0].start == close(sum(span.end - span.start for span in spans)), (p, m)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_is_slower_than_1f1b(name: str, ratio: str) -> None:
    for p, v, m in sizes(name):
        limit = simulated("1f1b", p, 1, m, RATIOS[ratio]).makespan
        assert simulated(name, p, v, m, RATIOS[ratio]).makespan <= limit + 1e-9, (p, v, m)


# Memory


@pytest.mark.parametrize("name", NAMES)
def test_activations_alive(name: str) -> None:
    for p, v, m in sizes(name):
        timeline = simulated(name, p, v, m)
        for stage in range(p):
            most, where = timeline.most_alive(stage), (p, v, m, stage)
            if name == "gpipe":
                assert most == m, where
            elif name == "1f1b":
                assert most == min(m, p - stage), where
            elif name == "interleaved":
                assert m % p or most == min(v * m, 2 * (p - stage - 1) + (v - 1) * p + 1), where
            else:
                assert most <= v * p, where
            assert timeline.alive(stage)[-1][1] == 0, "nothing is left at the end"


def test_with_enough_microbatches_the_limits_of_zero_bubble_are_reached() -> None:
    assert max(simulated("zb-h1", 4, 1, 16).most_alive(stage) for stage in range(4)) == 4
    assert max(simulated("zb-v", 4, 2, 16).most_alive(stage) for stage in range(4)) == 8


def test_split_backwards_stay_alive_until_the_weight_gradient() -> None:
    assert simulated("zb-h1", 1, 1, 1).alive(0) == [(0.0, 0), (0.0, 1), (3.0, 0)]
    assert simulated("1f1b", 2, 1, 1).alive(1) == [(0.0, 0), (1.0, 1), (4.0, 0)]


# The simulation, by hand


def spans_of(timeline: Timeline) -> list[list[tuple[float, float, Action | None]]]:
    return [[(span.start, span.end, span.waited_for) for span in spans] for spans in timeline.spans]


def test_two_stages_and_one_microbatch_by_hand() -> None:
    timeline = simulate(build("1f1b", 2, 1, 1), Costs(forward=1, input_gradient=0.5, weight_gradient=1.5, message=0.25))
    assert spans_of(timeline) == [
        [(0, 1, None), (4.5, 6.5, Action("B", 1, 0))],
        [(1.25, 2.25, Action("F", 0, 0)), (2.25, 4.25, None)],
    ]
    assert timeline.makespan == 6.5
    assert timeline.bubble == close(1 - 6 / 13)


def test_who_begins_as_soon_as_it_is_free_waited_for_nobody() -> None:
    """Stage 1 is free, and has its activation, at the same moment; its first forward alone waits."""
    first, *others = simulated("gpipe", 2, 1, 3).spans[1]
    assert first == Span(Action("F", 1, 0), 1.0, 2.0, Action("F", 0, 0))
    assert all(span.waited_for is None for span in others)


def test_a_message_takes_its_time_between_stages_only() -> None:
    """Down and up: three chunks' forwards and backwards cross a border of two stages, the fold does not."""
    plain, slow = (simulate(build("zb-v", 2, 2, 1), Costs(message=message)) for message in (0.0, 10.0))
    assert slow.makespan - plain.makespan == close(4 * 10)
    one = build("interleaved", 1, 2, 3)
    assert simulate(one, Costs(message=10)).makespan == simulate(one, EQUAL).makespan


def test_the_message_time_can_be_given_apart_from_the_costs() -> None:
    schedule = build("1f1b", 3, 1, 5)
    assert simulate(schedule, EQUAL, 0.5) == simulate(schedule, Costs(message=0.5))
    assert simulate(schedule, Costs(message=0.5), 0.0) == simulate(schedule, EQUAL)


def test_measured_times_may_be_a_function_of_stage_and_action() -> None:
    slow = simulate(build("gpipe", 2, 1, 4), lambda stage, action: 3.0 if stage == 1 and action.kind == "F" else 1.0)
    assert slow.makespan == 1 + 4 * 3 + 4 * 1 + 1


def test_a_chunk_takes_its_share_of_the_stage() -> None:
    for name in ("interleaved", "zb-v"):
        assert simulated(name, 1, 2, 3).makespan == close(3 * 3)


# Actions that wait for each other


def test_actions_that_wait_for_each_other_are_stuck() -> None:
    schedule = build("1f1b", 2, 1, 2)
    (forward, *rest), last = schedule.actions
    stuck = replace(schedule, actions=((*rest, forward), last))
    with pytest.raises(StuckError, match=r"stage 0 waits in .*'F', chunk=0, microbatch=0.*stage 1 waits in"):
        simulate(stuck, EQUAL)
    with pytest.raises(StuckError):
        communicate(stuck)
    with pytest.raises(StuckError):
        list(in_order(stuck))


def test_the_order_of_all_stages_respects_needs() -> None:
    schedule = build("zb-v", 3, 2, 4)
    done: set[Action] = set()
    for stage, action in in_order(schedule):
        assert done.issuperset(schedule.needs(action))
        assert action in schedule.actions[stage]
        done.add(action)
    assert len(done) == 3 * 2 * 3 * 4


# What check finds: a program that one would write first


CIRCLES = {
    ("1f1b", 2): [
        "stage 0 sends the activation of chunk 0, microbatch 1 to stage 1",
        "stage 1 sends the gradient of chunk 1, microbatch 0 to stage 0",
    ],
    ("1f1b", 4): [
        "stage 2 sends the activation of chunk 2, microbatch 1 to stage 3",
        "stage 3 sends the gradient of chunk 3, microbatch 0 to stage 2",
    ],
    ("zb-h1", 2): [
        "stage 0 sends the activation of chunk 0, microbatch 1 to stage 1",
        "stage 1 sends the gradient of chunk 1, microbatch 0 to stage 0",
    ],
    ("zb-h1", 4): [
        "stage 2 sends the activation of chunk 2, microbatch 1 to stage 3",
        "stage 3 sends the gradient of chunk 3, microbatch 0 to stage 2",
    ],
    ("zb-v", 2): [
        "stage 0 sends the activation of chunk 0, microbatch 1 to stage 1",
        "stage 1 sends the activation of chunk 2, microbatch 0 to stage 0",
    ],
    ("zb-v", 4): [
        "stage 2 sends the activation of chunk 2, microbatch 1 to stage 3",
        "stage 3 sends the activation of chunk 4, microbatch 0 to stage 2",
    ],
}


@pytest.mark.parametrize(("name", "stages"), CIRCLES)
def test_the_naive_program_hangs_and_the_circle_is_named(name: str, stages: int) -> None:
    schedule = build(name, stages, virtuals(name)[-1], 8)
    with pytest.raises(StuckError) as caught:
        check(schedule, naive(schedule))
    assert str(caught.value) == "; ".join(CIRCLES[name, stages])


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_naive_program_of_gpipe_does_not_hang(stages: int) -> None:
    schedule = build("gpipe", stages, 1, 8)
    check(schedule, naive(schedule))


def test_crossing_messages_are_exchanged() -> None:
    down, up = Message("activation", 0, 2), Message("gradient", 1, 1)
    program = communicate(build("1f1b", 2, 1, 3))
    assert Exchange(down, up, 1) in program[0]
    assert Exchange(up, down, 0) in program[1]


# What check finds: a program with one fault. The steps of two stages are lists here, to be spoilt.

F0, F1, B0, B1 = (Compute(Action(kind, chunk, 0)) for kind in "FB" for chunk in (0, 1))
F0_NEXT = Compute(Action("F", 0, 1))
DOWN, UP = Message("activation", 0, 0), Message("gradient", 1, 0)
SEND_DOWN, RECEIVE_DOWN, SEND_UP, RECEIVE_UP = Send(DOWN, 1), Receive(DOWN, 0), Send(UP, 0), Receive(UP, 1)


def swap(steps: Steps, one: Step, other: Step) -> None:
    i, j = steps.index(one), steps.index(other)
    steps[i], steps[j] = other, one


def move(steps: Steps, step: Step, before: Step) -> None:
    steps.remove(step)
    steps.insert(steps.index(before), step)


def a_message_missing(stage_0: Steps, stage_1: Steps) -> None:
    stage_0.remove(SEND_DOWN)
    stage_1.remove(RECEIVE_DOWN)


def an_action_on_the_wrong_stage(stage_0: Steps, stage_1: Steps) -> None:
    stage_0.remove(F0)
    stage_1.insert(0, F0)


def a_message_to_the_wrong_stage(stage_0: Steps, _: Steps) -> None:
    stage_0[stage_0.index(SEND_DOWN)] = Send(DOWN, 0)


FAULTS: dict[str, tuple[Callable[[Steps, Steps], None], str]] = {
    "an action missing": (lambda a, b: b.remove(B1), "stage 1 lacks or repeats actions"),
    "an action doubled": (lambda a, b: a.append(F0), "stage 0 lacks or repeats actions"),
    "an action on the wrong stage": (an_action_on_the_wrong_stage, "stage 0 lacks or repeats actions"),
    "microbatches out of order": (lambda a, b: swap(a, F0, F0_NEXT), "F of chunk 0: out of order"),
    "a message missing": (a_message_missing, "messages lacking .*activation"),
    "a send missing": (lambda a, b: a.remove(SEND_DOWN), "messages lacking .*activation"),
    "a receive missing": (lambda a, b: b.remove(RECEIVE_DOWN), "receives lacking .*activation"),
    "a message doubled": (lambda a, b: a.append(SEND_DOWN), "messages lacking .*too many .*activation"),
    "a receive doubled": (lambda a, b: a.append(RECEIVE_UP), "receives lacking .*too many .*gradient"),
    "a message to the wrong stage": (a_message_to_the_wrong_stage, "messages lacking .*activation.*too many .*activation"),
    "a receive after the action that needs it": (
        lambda a, b: swap(b, RECEIVE_DOWN, F1),
        "stage 1 does .*'F', chunk=1, microbatch=0.* without activation of chunk 0, microbatch 0",
    ),
    "an activation sent before the action that makes it": (lambda a, b: move(a, SEND_DOWN, F0), "before"),
    "a gradient sent before the action that makes it": (lambda a, b: move(b, SEND_UP, B1), "before"),
}


def spoilt(schedule: Schedule, fault: str) -> Program:
    lists = [list(steps) for steps in communicate(schedule)]
    FAULTS[fault][0](*lists)
    return tuple(map(tuple, lists))


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_in_a_program_is_said(fault: str) -> None:
    schedule = build("gpipe", 2, 1, 2)
    assert {F0, SEND_DOWN, F0_NEXT, RECEIVE_UP, B0} <= set(communicate(schedule)[0])
    with pytest.raises(AssertionError, match=FAULTS[fault][1]) as caught:
        check(schedule, spoilt(schedule, fault))
    assert not isinstance(caught.value, StuckError)


def test_a_schedule_that_lacks_an_action_everywhere_is_said() -> None:
    schedule = build("zb-h1", 2, 1, 2)
    fewer = replace(schedule, actions=(schedule.actions[0], schedule.actions[1][:-1]))
    with pytest.raises(AssertionError, match=r"the schedule lacks .*'W', chunk=1, microbatch=1"):
        check(fewer, communicate(fewer))


def test_every_message_is_sent_by_one_stage_and_received_by_the_other() -> None:
    program = communicate(build("zb-v", 3, 2, 4))
    both = [halves(step) for steps in program for step in steps]
    sent, received = ([message for message in column if message] for column in zip(*both, strict=True))
    assert sorted(sent) == sorted(received)
    assert len(sent) == len(set(sent)) == 4 * 2 * 4, "down two borders and up two, forward and backward, four microbatches"
