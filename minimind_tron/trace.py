"""One step as it ran: every action and every collective of every rank, on one clock, and what theory makes of it.

Where ranks share cores the wall clock says little: a stage that waits for a core looks like a stage that waits for a message. So
each action also records how long it kept its core busy, and three timelines stand under each other:

- *measured*: the wall clock;
- *replay*: the same order and dependencies, each action taking its own measured CPU time, one core a rank, messages free;
- *simulated*: the schedule with the median cost of each kind of action in each chunk.

Beside their bubbles stands that of equal stages: the schedule with the median cost of each kind over all chunks.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from minimind_tron.collectives import gather_objects
from minimind_tron.errors import TronError
from minimind_tron.gantt import draw_html, draw_png, panel_of
from minimind_tron.layout import live
from minimind_tron.ledger import Entry, ledger
from minimind_tron.mesh import Mesh
from minimind_tron.panels import Bar, Panel, Row, look_of
from minimind_tron.parallel.pipeline import Timed
from minimind_tron.parallel.schedules import Action, Schedule, Timeline, simulate
from minimind_tron.run_config import trace_files

T = TypeVar("T")
MILLI, MICRO = 1e3, 1e6


@dataclass
class Recording:
    """What one rank did in a step; ``epoch_s`` added to its times gives seconds since 1970, a clock that all hosts share."""

    timed: list[Timed] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    epoch_s: float = 0.0


@contextmanager
def recording() -> Iterator[Recording]:
    """Record this rank's collectives while the context is open; actions are recorded by whoever is given ``timed``."""
    with ledger() as entries:
        yield Recording(entries=entries, epoch_s=time.time() - time.perf_counter())


@dataclass(frozen=True)
class RankTrace:
    """A rank's recording with its place on the mesh."""

    rank: int
    stage: int
    place: str
    recording: Recording

    def at(self, time_s: float, start_s: float) -> float:
        """A time of this rank in seconds after ``start_s`` since 1970."""
        return time_s + self.recording.epoch_s - start_s


def collect(recorded: Recording, mesh: Mesh) -> list[RankTrace]:
    """The recordings of all ranks, in their order, on every rank."""
    axes = {"dp": mesh.dp, "pp": mesh.pp, "cp": mesh.cp, "tp": mesh.tp}
    place = ", ".join(f"{name} {axis.rank}" for name, axis in axes.items() if axis.size > 1)
    traces = [RankTrace(mesh.rank, mesh.pp.rank, place, recorded)]
    for axis in live(mesh.tp, mesh.cp, mesh.pp, mesh.dp):
        traces = [trace for theirs in gather_objects(traces, axis) for trace in theirs]
    return sorted(traces, key=lambda trace: trace.rank)


@dataclass(frozen=True)
class Bubbles:
    """The share of all stages' time in which nothing is computed: on the wall clock, replayed, simulated, with equal stages."""

    measured: float
    replayed: float
    simulated: float
    equal_stages: float

    def __str__(self) -> str:
        parts = {"wall clock": self.measured, "replay": self.replayed, "simulated": self.simulated}
        return ", ".join(f"{name} {value:.1%}" for name, value in parts.items()) + f"; equal stages {self.equal_stages:.1%}"


@dataclass(frozen=True)
class Analysis:
    """A traced step: when it began (seconds since 1970), its three timelines, in seconds, and their bubbles."""

    start_s: float
    replayed: Timeline
    simulated: Timeline
    bubbles: Bubbles


def analyse(traces: list[RankTrace], schedule: Schedule) -> Analysis:
    """Replay and simulate a traced step.

    Ranks of one stage work on the same action together, so an action costs what its slowest rank measured.
    Raises: AssertionError for a trace that lacks an action of the schedule.
    """
    busy: dict[Action, float] = defaultdict(float)
    for trace in traces:
        for timed in trace.recording.timed:
            busy[timed.action] = max(busy[timed.action], timed.cpu_s)
    missing = {action for actions in schedule.actions for action in actions} - busy.keys()
    assert not missing, f"the trace lacks {sorted(missing)}"

    def medians(key: Callable[[Action], object]) -> Callable[[int, Action], float]:
        groups: dict[object, list[float]] = defaultdict(list)
        for action, cost in busy.items():
            groups[key(action)].append(cost)
        return lambda _, action: median(groups[key(action)])

    replayed = simulate(schedule, lambda _, action: busy[action])
    simulated = simulate(schedule, medians(lambda action: (action.kind, action.chunk)))
    equal = simulate(schedule, medians(lambda action: action.kind))
    times = [(trace.at(t.start_s, 0), trace.at(t.end_s, 0)) for trace in traces for t in trace.recording.timed]
    begin, end = min(start for start, _ in times), max(end for _, end in times)
    # Collectives of the step may begin before its first action.
    first = min([begin, *(trace.at(entry.start_s, 0) for trace in traces for entry in trace.recording.entries)])
    measured = 1 - sum(stop - start for start, stop in times) / (len(traces) * (end - begin))
    return Analysis(first, replayed, simulated, Bubbles(measured, replayed.bubble, simulated.bubble, equal.bubble))


def chrome(traces: list[RankTrace], analysis: Analysis) -> dict[str, Any]:
    """The step in the Trace Event Format, which chrome://tracing and Perfetto open: a process a rank, times in microseconds.

    Thread 0 has the actions; collectives and messages, which overlap, take as many threads more as they need.
    Source: the Trace Event Format, Google, 2016; complete ("X") and metadata ("M") events.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append(_named("process_name", trace.rank, 0, f"rank {trace.rank} ({trace.place or 'alone'})"))
        events.append(_named("thread_name", trace.rank, 0, "actions"))
        for timed in trace.recording.timed:
            events.append(_action_event(timed, trace, analysis.start_s))
        for thread, entries in enumerate(_apart(trace.recording.entries), start=1):
            events.append(_named("thread_name", trace.rank, thread, "collectives and messages"))
            for entry in entries:
                events.append(_collective_event(entry, thread, trace, analysis.start_s))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"bubbles": asdict(analysis.bubbles)}}


def _action_event(timed: Timed, trace: RankTrace, start_s: float) -> dict[str, Any]:
    action = timed.action
    details = {"chunk": action.chunk, "microbatch": action.microbatch, "cpu_ms": timed.cpu_s * MILLI}
    span = trace.at(timed.start_s, start_s), trace.at(timed.end_s, start_s)
    return _event(f"{action.kind}{action.microbatch}", "action", trace.rank, 0, span, details)


def _collective_event(entry: Entry, thread: int, trace: RankTrace, start_s: float) -> dict[str, Any]:
    details = {"axis": entry.axis, "sent_bytes": entry.sent_bytes, "backward": entry.backward, "action": entry.action}
    span = trace.at(entry.start_s, start_s), trace.at(entry.end_s, start_s)
    return _event(f"{entry.kind} {entry.axis}", "collective", trace.rank, thread, span, details)


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _event(name: str, category: str, rank: int, thread: int, span: tuple[float, float], details: dict[str, Any]) -> dict[str, Any]:
    start, end = span
    times = {"ts": start * MICRO, "dur": max(0.0, end - start) * MICRO}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": rank, "tid": thread, "args": details}


def _apart(entries: list[Entry]) -> list[list[Entry]]:
    """Entries in lists without overlap."""
    lists: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: entry.start_s):
        home = next((each for each in lists if each[-1].end_s <= entry.start_s), None)
        if home is None:
            lists.append(home := [])
        home.append(entry)
    return lists


def panels(traces: list[RankTrace], analysis: Analysis, schedule: Schedule) -> list[Panel]:
    """The three timelines as drawings, in milliseconds."""
    bubbles = analysis.bubbles
    rows = tuple(Row(f"rank {trace.rank}, stage {trace.stage}", _bars(trace, analysis.start_s)) for trace in traces)
    end = max(bar.end for row in rows for bar in row.bars)
    measured = Panel(
        title=f"measured: {schedule.name} on the wall clock",
        subtitle=f"{end:.1f} ms, bubble {bubbles.measured:.1%}; ranks that share cores wait for those, too",
        rows=rows,
        unit="ms",
    )
    replay = _in_milliseconds(analysis.replayed, "replay: each action at its own CPU time, one core a rank, messages free", "")
    equal = f", with equal stages {bubbles.equal_stages:.1%}"
    simulated = _in_milliseconds(analysis.simulated, "simulated: median cost of each kind and chunk", equal)
    return [measured, replay, simulated]


def _bars(trace: RankTrace, start_s: float) -> tuple[Bar, ...]:
    bars = []
    for timed in trace.recording.timed:
        action = timed.action
        start, end = (trace.at(time_s, start_s) * MILLI for time_s in (timed.start_s, timed.end_s))
        details = (
            ("rank", f"{trace.rank} ({trace.place or 'alone'})"),
            ("action", look_of(action.kind).words),
            ("microbatch", str(action.microbatch)),
            ("chunk", str(action.chunk)),
            ("time", f"{start:.2f} - {end:.2f} ms"),
            ("core busy", f"{timed.cpu_s * MILLI:.2f} ms"),
        )
        bars.append(Bar(action.kind, str(action.microbatch), start, end, details))
    return tuple(bars)


def _in_milliseconds(timeline: Timeline, title: str, note: str) -> Panel:
    spans = tuple(
        tuple(replace(span, start=span.start * MILLI, end=span.end * MILLI) for span in stage) for stage in timeline.spans
    )
    panel = panel_of(Timeline(timeline.schedule, spans))
    return replace(
        panel, title=title, subtitle=f"{timeline.makespan * MILLI:.1f} ms, bubble {timeline.bubble:.1%}{note}", unit="ms"
    )


def write(path: Path, recorded: Recording, schedule: Schedule, mesh: Mesh) -> Bubbles:
    """Write the trace of all ranks and its drawings; every rank calls it, rank 0 writes, every rank gets the bubbles.

    Cost: a gather of all recordings to all ranks. Raises: TronError on rank 0 for files that cannot be written.
    """
    traces = collect(recorded, mesh)
    analysis = analyse(traces, schedule)
    if mesh.rank == 0:
        file, png, html = trace_files(path)
        drawn = panels(traces, analysis, schedule)
        try:
            file.write_text(json.dumps(chrome(traces, analysis)) + "\n", encoding="utf-8")
            draw_png(drawn, png)
            draw_html(drawn, html, f"minimind-tron: one step, {schedule.name}")
        except OSError as error:
            raise TronError(f"trace={path} cannot be written ({error.strerror})", "change --trace") from None
    return analysis.bubbles


def traced(path: Path, schedule: Schedule, mesh: Mesh, step: Callable[[list[Timed]], T]) -> tuple[T, Bubbles | None]:
    """Run a step that notes its actions, and write what all ranks did; a step without any action leaves nothing to write.

    Cost: that of ``write``, after the step.
    """
    with recording() as recorded:
        result = step(recorded.timed)
    return result, write(path, recorded, schedule, mesh) if recorded.timed else None
