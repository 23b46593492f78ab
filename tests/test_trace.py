"""Traces: one clock, every action and collective once, and what replaying CPU times says."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minimind_tron.config import OptimizerConfig
from minimind_tron.ledger import Entry
from minimind_tron.model import Model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel.pipeline import Timed
from minimind_tron.parallel.schedules import Schedule, build
from minimind_tron.step import schedule_of, train_step
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from minimind_tron.trace import Analysis, RankTrace, Recording, analyse, chrome, panels, traced
from tests.meshes import mesh_of, random_batch, tiny

COSTS = {"F": 0.010, "B": 0.020}


def faked(schedule: Schedule, slow: dict[int, float] | None = None, epochs: tuple[float, ...] = (0.0, 0.0)) -> list[RankTrace]:
    """Two ranks that run their actions one after the other; a stage in ``slow`` takes so many times as long."""
    traces = []
    for stage, actions in enumerate(schedule.actions):
        now, timed = 100.0 - epochs[stage], []
        for action in actions:
            busy_s = COSTS[action.kind] * (slow or {}).get(stage, 1.0)
            timed.append(Timed(action, now, now + 2 * busy_s, busy_s))
            now += 2 * busy_s
        entries = [Entry("pp", "send", 64, False, now - 0.01, now, "F"), Entry("pp", "receive", 0, True, now - 0.02, now)]
        traces.append(RankTrace(stage, stage, f"pp {stage}", Recording(timed, entries, epochs[stage])))
    return traces


def test_a_replay_of_equal_costs_is_the_schedule() -> None:
    for name in ("gpipe", "1f1b"):
        schedule = build(name, 2, 1, 8)
        analysis = analyse(faked(schedule), schedule)
        assert analysis.bubbles.replayed == pytest.approx(1 / 9)
        assert analysis.bubbles.simulated == pytest.approx(1 / 9)
        assert analysis.bubbles.equal_stages == pytest.approx(1 / 9)
        assert analysis.replayed.makespan == pytest.approx(9 * 0.030)


def test_a_slow_stage_shows_in_the_replay_and_not_in_equal_stages() -> None:
    schedule = build("1f1b", 2, 1, 8)
    analysis = analyse(faked(schedule, slow={1: 2.0}), schedule)
    assert analysis.replayed.makespan == pytest.approx(8 * 0.060 + 0.030)
    assert analysis.bubbles.replayed == analysis.bubbles.simulated == pytest.approx(1 - 8 * 0.090 / (2 * 0.510))
    assert analysis.bubbles.equal_stages == pytest.approx(1 / 9)


def test_an_action_costs_what_the_slowest_rank_of_its_stage_measured() -> None:
    schedule = build("1f1b", 2, 1, 4)
    both = [*faked(schedule), *(RankTrace(t.rank + 2, t.stage, "", t.recording) for t in faked(schedule, slow={0: 3.0}))]
    assert analyse(both, schedule).replayed == analyse(faked(schedule, slow={0: 3.0}), schedule).replayed


def test_an_action_that_is_not_in_the_trace_is_missed() -> None:
    schedule = build("1f1b", 2, 1, 4)
    traces = faked(schedule)
    del traces[1].recording.timed[3]
    with pytest.raises(AssertionError, match="the trace lacks"):
        analyse(traces, schedule)


def actions_in(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "action"]


def check_events(written: dict[str, Any], schedule: Schedule, ranks_a_stage: int = 1) -> None:
    """The rules of the format, every action once a rank, nothing overlapping on a thread, nothing before the beginning."""
    events = written["traceEvents"]
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        ordered = sorted(spans)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(ordered))
    seen = sorted((e["name"], e["args"]["chunk"]) for e in actions_in(events))
    wanted = [(f"{a.kind}{a.microbatch}", a.chunk) for actions in schedule.actions for a in actions]
    assert seen == sorted(wanted * ranks_a_stage)


def test_events_obey_the_format_and_share_a_clock() -> None:
    schedule = build("1f1b", 2, 1, 4)
    apart = [(0.0, 0.0), (1000.0, -3.0)]
    written = [chrome(t := faked(schedule, epochs=epochs), analyse(t, schedule)) for epochs in apart]
    for each in written:
        check_events(each, schedule)
    starts = [[event["ts"] for event in actions_in(each["traceEvents"])] for each in written]
    assert starts[0] == pytest.approx(starts[1], abs=1.0), "clocks that run apart are set to one"
    assert sum(event.get("cat") == "collective" for event in written[0]["traceEvents"]) == 4


def test_three_panels_with_every_action() -> None:
    schedule = build("interleaved", 2, 2, 4)
    traces = faked(schedule)
    drawn = panels(traces, analyse(traces, schedule), schedule)
    assert [panel.title.split(":")[0] for panel in drawn] == ["measured", "replay", "simulated"]
    for panel in drawn:
        assert sum(len(row.bars) for row in panel.rows) == sum(map(len, schedule.actions))
        assert panel.unit == "ms"
    assert "core busy" in dict(drawn[0].rows[0].bars[0].details)


def trace_a_step(path: Path, degrees: MeshConfig, name: str, microbatches: int) -> tuple[Schedule, Any]:
    strategy = StrategyConfig(zero=3 if degrees.dp_size > 1 else 0)
    model = Model(tiny(num_hidden_layers=4), mesh_of(degrees), strategy, PipelineConfig(pp_schedule=name))
    initialise(model, 1)
    batch, adamw = random_batch(microbatches * degrees.dp_size, 8, 37), build_adamw(model, OptimizerConfig())
    schedule = schedule_of(model, microbatches)
    _, bubbles = traced(path, schedule, model.mesh, lambda timed: train_step(model, adamw, batch, 1, 1.0, timed=timed))
    return schedule, bubbles


@pytest.mark.parametrize(("pp", "tp", "name"), [(1, 1, "1f1b"), (2, 1, "zb-v"), (2, 2, "1f1b")])
def test_a_real_step(pool, tmp_path: Path, pp: int, tp: int, name: str) -> None:
    results = pool(pp * tp).run(trace_a_step, tmp_path / "a.json", MeshConfig(pp_size=pp, tp_size=tp), name, 3)
    assert all(bubbles == results[0][1] for _, bubbles in results), "every rank knows the bubbles"
    written = json.loads((tmp_path / "a.json").read_text())
    check_events(written, results[0][0], ranks_a_stage=tp)
    sent = [event for event in written["traceEvents"] if event["name"] == "send pp"]
    # Activations and gradients over every border; the fold of zb-v sends nothing.
    borders = {"zb-v": 2, "1f1b": 1}[name] * (pp - 1)
    assert len(sent) == 2 * borders * 3 * tp
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "replay: each action" in (tmp_path / "a.html").read_text(encoding="utf-8")
    if tp > 1:
        inside = [e for e in written["traceEvents"] if e["name"] == "all_reduce tp" and e["args"]["action"]]
        assert {e["args"]["action"].split()[0] for e in inside} == {"F", "B"}


def test_a_real_step_over_dp_shows_what_zero_sends(pool, tmp_path: Path) -> None:
    results = pool(4).run(trace_a_step, tmp_path / "a.json", MeshConfig(pp_size=2, dp_size=2), "zb-h1", 3)
    written = json.loads((tmp_path / "a.json").read_text())
    check_events(written, results[0][0], ranks_a_stage=2)
    found = Counter((e["name"], e["args"]["action"][:1]) for e in written["traceEvents"] if e["name"].endswith(" dp"))
    # Two blocks and an end on each of two stages, three microbatches, two ranks a stage; gathers under F and I, sums under W.
    each = 3 * 2 * 3 * 2
    assert {name: found[name] for name in found if name[1]} == {
        ("all_gather dp", "F"): each,
        ("all_gather dp", "I"): each,
        ("reduce_scatter dp", "W"): each,
    }


def test_a_step_without_a_label_leaves_nothing_to_write(tmp_path: Path) -> None:
    result, bubbles = traced(tmp_path / "a.json", build("1f1b", 1, 1, 1), mesh_of(MeshConfig()), lambda timed: 7)
    assert (result, bubbles) == (7, None)
    assert list(tmp_path.iterdir()) == []


def test_the_analysis_begins_with_the_first_of_all(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 1, 2)
    traces = faked(schedule)
    traces[1].recording.entries.append(Entry("tp", "all_reduce", 4, False, 99.0, 99.5))
    analysis: Analysis = analyse(traces, schedule)
    assert analysis.start_s == 99.0
