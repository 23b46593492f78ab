"""schedule: pipeline schedules drawn side by side, without running them; no process and no torch is needed."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minimind_tron.config_files import flatten
from minimind_tron.gantt import draw_html, draw_png, draw_text, panel_of
from minimind_tron.new_files import write
from minimind_tron.parallel.messages import Compute, Exchange, Message, Program, Receive, Send, Step, check, communicate
from minimind_tron.parallel.schedules import Action, Costs, Schedule, Timeline, build, simulate
from minimind_tron.runtime import say
from minimind_tron.topology import virtual_stages_of
from minimind_tron.view_config import ScheduleConfig

NARROWEST = 20


@dataclass(frozen=True)
class Summary:
    """What a schedule costs: times in the units of the costs, activations in whole stages' worth."""

    schedule: str
    virtual_stages: int
    makespan: float
    bubble: float
    ideal: float | None
    formula: str | None
    alive: tuple[float, ...]
    messages: int


@dataclass(frozen=True)
class ScheduleResult:
    """A summary of every schedule, and the files that were written."""

    summaries: tuple[Summary, ...]
    files: tuple[Path, ...]
    exit_code: int = 0


@dataclass(frozen=True)
class _Drawn:
    """A schedule, when everything happens in it, and what its stages say to each other."""

    schedule: Schedule
    timeline: Timeline
    program: Program


def ideal_bubble(schedule: Schedule, costs: Costs) -> tuple[float, str] | None:
    """The bubble that a schedule's paper promises where messages are free, with its formula; None where it promises none.

    Source: the table of ``parallel/schedules.py``.
    """
    p, v, m = schedule.placement.stages, schedule.placement.virtual, schedule.microbatches
    equal = costs.forward == costs.input_gradient == costs.weight_gradient
    match schedule.name:
        case "gpipe" | "1f1b":
            return (p - 1) / (m + p - 1), "(p-1)/(m+p-1)"
        case "interleaved" if m % p == 0:
            return (p - 1) / (v * m + p - 1), "(p-1)/(vm+p-1)"
        case "zb-h1" if equal and m >= p:
            return (p - 1) / (3 * m + p - 1), "(p-1)/(3m+p-1)"
        case "zb-v" if equal and m >= 2 * p - 1:
            return (p - 1) / (6 * m + p - 1), "(p-1)/(6m+p-1)"
    return None


def summarise(drawn: _Drawn, costs: Costs) -> Summary:
    """The figures of a schedule."""
    schedule, timeline = drawn.schedule, drawn.timeline
    virtual = schedule.placement.virtual
    ideal, formula = ideal_bubble(schedule, costs) or (None, None)
    return Summary(
        schedule=schedule.name,
        virtual_stages=virtual,
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        ideal=ideal,
        formula=formula,
        alive=tuple(timeline.most_alive(stage) / virtual for stage in range(schedule.placement.stages)),
        messages=sum(isinstance(step, Send | Exchange) for steps in drawn.program for step in steps),
    )


def table(summaries: tuple[Summary, ...]) -> str:
    """The figures of all schedules under each other."""
    head = (
        "schedule",
        "chunks a stage",
        "makespan",
        "bubble",
        "with free messages",
        "most alive",
        "messages",
        "alive on each stage",
    )
    lines = [head, *map(_cells, summaries)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = []
    for line in lines:
        aligned = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        # The first and the last column are words and lists; the others are numbers, which end where the others end.
        aligned[0], aligned[-1] = line[0].ljust(widths[0]), line[-1]
        rows.append("  ".join(aligned).rstrip())
    return "\n".join(rows)


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        summary.schedule,
        str(summary.virtual_stages),
        f"{summary.makespan:.6g}",
        f"{summary.bubble:.1%}",
        "-" if summary.ideal is None else f"{summary.formula} = {summary.ideal:.1%}",
        f"{max(summary.alive):g}",
        str(summary.messages),
        " ".join(f"{count:g}" for count in summary.alive),
    )


# As plain data


def _action(action: Action | None) -> dict[str, Any] | None:
    return asdict(action) if action else None


def _message(message: Message) -> dict[str, Any]:
    return asdict(message)


def _step(step: Step) -> dict[str, Any]:
    match step:
        case Compute(action):
            return {"do": "compute", "action": _action(action)}
        case Send(message, peer):
            return {"do": "send", "message": _message(message), "peer": peer}
        case Receive(message, peer):
            return {"do": "receive", "message": _message(message), "peer": peer}
        case Exchange(sent, received, peer):
            return {"do": "exchange", "sent": _message(sent), "received": _message(received), "peer": peer}


def as_data(drawn: _Drawn, summary: Summary) -> dict[str, Any]:
    """A schedule for JSON: its figures, every stage's actions with their times, and every stage's program."""
    actions = [
        [{**asdict(s.action), "start": s.start, "end": s.end, "waited_for": _action(s.waited_for)} for s in spans]
        for spans in drawn.timeline.spans
    ]
    return {**asdict(summary), "actions": actions, "program": [[_step(step) for step in steps] for steps in drawn.program]}


# The command


def _simulated(name: Any, config: ScheduleConfig, costs: Costs) -> _Drawn:
    virtual = virtual_stages_of(name, config.virtual_stages if name == "interleaved" else None)
    schedule = build(name, config.pp_size, virtual, config.num_microbatches)
    program = communicate(schedule)
    check(schedule, program)
    return _Drawn(schedule, simulate(schedule, costs), program)


def run(config: ScheduleConfig) -> ScheduleResult:
    """Simulate, prove free of deadlock, draw, print, and write the files that were asked for.

    Raises: TronError for a file that cannot be written.
    """
    costs = Costs(config.cost_forward, config.cost_input_gradient, config.cost_weight_gradient, config.cost_message)
    drawn = [_simulated(name, config, costs) for name in dict.fromkeys(config.pp_schedule)]
    summaries = tuple(summarise(one, costs) for one in drawn)
    panels = [panel_of(one.timeline) for one in drawn]
    say(draw_text(panels, max(NARROWEST, shutil.get_terminal_size().columns)))
    say(table(summaries))

    def write_json(path: Path) -> None:
        schedules = [as_data(one, summary) for one, summary in zip(drawn, summaries, strict=True)]
        path.write_text(json.dumps({"config": flatten(config), "schedules": schedules}, indent=1) + "\n", encoding="utf-8")

    title = f"Pipeline schedules: {config.pp_size} stages, {config.num_microbatches} microbatches"
    files = write("png", config.png, lambda path: draw_png(panels, path))
    files += write("html", config.html, lambda path: draw_html(panels, path, title))
    files += write("json_file", config.json_file, write_json)
    if files:
        say(f"wrote {', '.join(map(str, files))}")
    return ScheduleResult(summaries, tuple(files))
