"""Gantt charts of pipelines, from plain records: simulated schedules and measured traces, as text, as an image and as a page.

Panels drawn together share one time scale. Kinds of work are told apart by lightness, hatching and letters, not by hue; of the
chunks of a stage, the later one has the higher mark (the small letter, in text). What is blank is idle: the bubble.
"""

import math
import re
import sys
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from minimind_tron.gantt_page import page
from minimind_tron.panels import (
    Bar,
    Look,
    Panel,
    Row,
    bars_of,
    chunk_places,
    has_chunks,
    kinds_in,
    longest,
    look_of,
    mark_height,
    most_alive,
    number,
    shortest,
    ticks,
)
from minimind_tron.parallel.schedules import Action, Span, Timeline

# From a simulation


def panel_of(timeline: Timeline) -> Panel:
    """A simulated schedule, every bar with the reason why it did not begin earlier."""
    schedule, stages = timeline.schedule, range(len(timeline.spans))
    virtual = schedule.placement.virtual
    most = [number(timeline.most_alive(stage) / virtual) for stage in stages]
    alive = ", ".join(most) if len(most) <= 8 else f"up to {max(most, key=float)}"
    return Panel(
        title=f"{schedule.name}   p = {len(stages)}, v = {virtual}, m = {schedule.microbatches}",
        subtitle=f"makespan {number(timeline.makespan)}, bubble {timeline.bubble:.1%}, most activations alive per stage: {alive}",
        rows=tuple(_row_of(timeline, stage) for stage in stages),
        unit="time",
    )


def _row_of(timeline: Timeline, stage: int) -> Row:
    virtual = timeline.schedule.placement.virtual
    bars = tuple(_bar_of(timeline, stage, position) for position in range(len(timeline.spans[stage])))
    return Row(f"stage {stage}", bars, tuple((time, count / virtual) for time, count in timeline.alive(stage)))


def _bar_of(timeline: Timeline, stage: int, position: int) -> Bar:
    span = timeline.spans[stage][position]
    action = span.action
    details = (
        ("stage", str(stage)),
        ("action", look_of(action.kind).words),
        ("microbatch", str(action.microbatch)),
        ("chunk", str(action.chunk)),
        ("time", f"{number(span.start)} - {number(span.end)}"),
        ("not earlier, because", _reason(timeline, span, first=position == 0)),
    )
    return Bar(action.kind, str(action.microbatch), span.start, span.end, details)


def _reason(timeline: Timeline, span: Span, first: bool) -> str:
    if span.waited_for:
        return f"it waited for {words(span.waited_for)}, on stage {timeline.schedule.placement.stage_of(span.waited_for.chunk)}"
    return "it is the first" if first else "the stage was busy"


def words(action: Action) -> str:
    """An action as a reader would say it."""
    return f"{look_of(action.kind).words} of microbatch {action.microbatch}, chunk {action.chunk}"


# As text


def draw_text(panels: Sequence[Panel], width: int, ascii_only: bool | None = None) -> str:
    """The panels in lines of at most ``width`` columns; in ASCII where stdout takes nothing else, unless that is said."""
    if ascii_only is None:
        ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    names = _short_names([row.name for panel in panels for row in panel.rows], max(3, width // 4))
    margin = max(map(len, names.values()), default=0)
    scale = _columns_a_unit(panels, max(1, width - margin - 3))
    # Where the shortest bars have less than a column, letters would be a random choice among them.
    lettered = scale * shortest(panels) > 0.99
    lines: list[str] = []
    for panel in panels:
        lines += textwrap.wrap(panel.title, width) + textwrap.wrap(panel.subtitle, width)
        cells = round(panel.end * scale)
        lines += [f"{names[row.name]:>{margin}} │{_cells(row, scale, cells, lettered, ascii_only)}│" for row in panel.rows]
        lines.append("")
    text = "\n".join(lines + textwrap.wrap(_legend(panels, ascii_only), width)) + "\n"
    return text.replace("│", "|").encode("ascii", "replace").decode() if ascii_only else text


def _short_names(names: list[str], room: int) -> dict[str, str]:
    """Names that fit: as they are, or else with words as initials, or else their ends."""
    if max(map(len, names), default=0) <= room:
        return {name: name for name in names}
    return {name: re.sub(r"([^\W\d_])[^\W\d_]*\s*", r"\1", name)[-room:] for name in names}


def _columns_a_unit(panels: Sequence[Panel], room: int) -> float:
    """As large as fits, but such that all bars have whole columns where they can, and no more than the longest label needs."""
    edges = {edge for bar in bars_of(panels) for edge in (bar.start, bar.end)}
    exact = {Fraction(edge).limit_denominator(1000) for edge in edges if edge} or {Fraction(1)}
    beat = Fraction(math.gcd(*(f.numerator for f in exact)), math.lcm(*(f.denominator for f in exact)))
    wanted = max((len(_label(bar)) for bar in bars_of(panels)), default=1)
    most = wanted / shortest(panels)
    whole = min(math.floor(room * beat / Fraction(longest(panels))), math.ceil(most * beat))
    return float(whole / beat) if whole >= 1 else min(room / longest(panels), most)


def _label(bar: Bar) -> str:
    return f"{bar.kind}{bar.label}" if len(bar.kind) == 1 else bar.label or bar.kind


def _cells(row: Row, scale: float, cells: int, lettered: bool, ascii_only: bool) -> str:
    if not lettered:
        return _mixed(row, scale, cells, ascii_only)
    line = [" "] * cells
    for bar, place in zip(row.bars, chunk_places(row)[0], strict=True):
        first, last = round(bar.start * scale), round(bar.end * scale)
        room, look = last - first, look_of(bar.kind)
        label = _label(bar).lower() if place % 2 else _label(bar)
        # Part of a number would be another number.
        label = label if len(label) <= room else label[:1]
        line[first:last] = label[:room].ljust(room, look.ascii if ascii_only else look.block)
    return "".join(line)


def _mixed(row: Row, scale: float, cells: int, ascii_only: bool) -> str:
    """Columns of several bars each: what is owed most is drawn next, so that shares of time stay right."""
    shares: list[dict[str, float]] = [{} for _ in range(cells)]
    for bar in row.bars:
        first, last, look = bar.start * scale, bar.end * scale, look_of(bar.kind)
        block = look.ascii if ascii_only else look.block
        for column in range(int(first), min(math.ceil(last), cells)):
            overlap = min(last, column + 1) - max(first, column)
            shares[column][block] = shares[column].get(block, 0.0) + overlap
    owed: dict[str, float] = {" ": 0.0}
    line = ""
    for share in shares:
        for block, amount in [*share.items(), (" ", 1 - sum(share.values()))]:
            owed[block] = owed.get(block, 0.0) + amount
        line += max(owed, key=lambda block: owed[block])
        owed[line[-1]] -= 1
    return line


def _legend(panels: Sequence[Panel], ascii_only: bool) -> str:
    looks = [(kind, look_of(kind)) for kind in kinds_in(panels)]
    entries = [
        f"{kind if kind != look.words else ''}{look.ascii if ascii_only else look.block} {look.words}" for kind, look in looks
    ]
    later = ["small letters: a stage's second chunk (fourth, ...)"] if has_chunks(panels) else []
    return "; ".join([*entries, "blank: bubble", *later])


# As an image, in inches

_CHARACTER = 0.058  # width of one in a label
_LEFT, _RIGHT, _HEAD, _FOOT, _LEGEND = 1.0, 0.55, 0.55, 0.3, 0.35
# In shares of a row, from above: top and bottom of its bars; foot and height of its curve of activations.
_BAR = (0.06, 0.60)
_ALIVE = (0.97, 0.30)


def draw_png(panels: Sequence[Panel], path: Path) -> None:
    """The panels under each other on one time scale, as an image that survives a black-and-white printer.

    Raises: OSError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    row_height = min(0.5, 40 / max(1, sum(len(panel.rows) for panel in panels)))
    # Wide enough for the shortest bar's label, between a page's width and what still opens.
    inner = min(max(0.2 * longest(panels) / shortest(panels), 8.0), 22.0)
    width = _LEFT + inner + _RIGHT
    height = sum(_HEAD + row_height * len(panel.rows) + _FOOT for panel in panels) + _LEGEND
    figure = Figure(figsize=(width, height))
    end, most, top = longest(panels), most_alive(panels), height
    for panel in panels:
        tall = row_height * max(1, len(panel.rows))
        for line, text, weight in ((0.25, panel.title, "bold"), (0.45, panel.subtitle, "normal")):
            figure.text(_LEFT / width, (top - line) / height, text, fontsize=9, fontweight=weight, parse_math=False)
        top -= _HEAD + tall
        axes = figure.add_axes((_LEFT / width, top / height, inner / width, tall / height))
        _draw_panel(axes, panel, end, inner / end, most)
        top -= _FOOT
    _draw_legend(figure, panels, _LEFT / width)
    with rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(path, dpi=160, format="png")


def _draw_panel(axes: Any, panel: Panel, end: float, inches: float, most: float) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(max(1, len(panel.rows)), 0)
    axes.set_yticks([y + sum(_BAR) / 2 for y in range(len(panel.rows))], [row.name for row in panel.rows], parse_math=False)
    axes.set_xticks(ticks(end))
    axes.tick_params(labelsize=8, length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    below = {"xy": (0, 0), "xycoords": "axes fraction", "xytext": (-10, -5), "textcoords": "offset points"}
    axes.annotate(panel.unit, **below, ha="right", va="top", fontsize=8, parse_math=False)
    last = panel.end
    axes.axvline(last, color="0.5", linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    _draw_bars(axes, panel)
    for y, row in enumerate(panel.rows):
        _draw_labels(axes, row, y, inches)
        _draw_alive(axes, row, y, last, most)


def _draw_bars(axes: Any, panel: Panel) -> None:
    from matplotlib.collections import PolyCollection

    corners: dict[str, list[list[tuple[float, float]]]] = {}
    marks: dict[Look, list[tuple[float, float, float]]] = {}
    for y, row in enumerate(panel.rows):
        top, bottom = y + _BAR[0], y + _BAR[1]
        places, count = chunk_places(row)
        for bar, place in zip(row.bars, places, strict=True):
            box = [(bar.start, top), (bar.end, top), (bar.end, bottom), (bar.start, bottom)]
            corners.setdefault(bar.kind, []).append(box)
            if place:
                height, inset = bottom - (bottom - top) * mark_height(place, count), 0.15 * (bar.end - bar.start)
                marks.setdefault(look_of(bar.kind), []).append((height, bar.start + inset, bar.end - inset))
    for kind, boxes in corners.items():
        look = look_of(kind)
        style: dict[str, Any] = {"facecolors": look.face, "edgecolors": "black", "linewidths": 0.4, "hatch": look.hatch}
        axes.add_collection(PolyCollection(boxes, **style))
    for look, lines in marks.items():
        if look.hatch:
            axes.hlines(*zip(*lines, strict=True), colors=look.face, linewidth=3.6)
        axes.hlines(*zip(*lines, strict=True), colors=look.ink, linewidth=1.4)


def _draw_labels(axes: Any, row: Row, y: int, inches: float) -> None:
    top, bottom = _BAR
    middle = y + bottom - (bottom - top) * (0.5 if chunk_places(row)[1] < 2 else 0.34)
    for bar in row.bars:
        if bar.label and (bar.end - bar.start) * inches >= _CHARACTER * len(bar.label) + 0.04:
            look = look_of(bar.kind)
            # What the hatching would cross stands on its own ground.
            ground = {"boxstyle": "square,pad=0.1", "facecolor": look.face, "edgecolor": "none"} if look.hatch else None
            style = {"ha": "center", "va": "center_baseline", "fontsize": 7, "parse_math": False}
            axes.text((bar.start + bar.end) / 2, middle, bar.label, color=look.ink, bbox=ground, **style)


def _draw_alive(axes: Any, row: Row, y: int, end: float, most: float) -> None:
    if not most or not row.alive:
        return
    foot, height = _ALIVE
    times = [time for time, _ in row.alive] + [end]
    levels = [y + foot - height * count / most for _, count in row.alive]
    axes.fill_between(times, [*levels, levels[-1]], y + foot, step="post", facecolor="0.8", edgecolor="0.3", linewidth=0.6)
    peak = max(count for _, count in row.alive)
    beside = {"xy": (1, y + foot), "xycoords": ("axes fraction", "data"), "xytext": (3, 0), "textcoords": "offset points"}
    axes.annotate(number(peak), **beside, fontsize=7, color="0.3", va="bottom", annotation_clip=False)


def _draw_legend(figure: Any, panels: Sequence[Panel], left: float) -> None:
    from matplotlib.patches import Patch

    thin: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4}
    looks = [look_of(kind) for kind in kinds_in(panels)]
    entries = [Patch(facecolor=look.face, hatch=look.hatch, label=look.words, **thin) for look in looks]
    entries.append(Patch(facecolor="white", label="white: bubble"))
    if most_alive(panels):
        entries.append(Patch(facecolor="0.8", label="activations alive; the most at the right", **thin))
    if has_chunks(panels):
        entries.append(Patch(facecolor="white", label="line in a bar: a later chunk, the higher the later"))
    style = {"ncols": 4, "fontsize": 7.5, "frameon": False, "borderpad": 0.2, "borderaxespad": 0.2}
    figure.legend(handles=entries, loc="lower left", bbox_to_anchor=(left, 0), **style)


# As a page


def draw_html(panels: Sequence[Panel], path: Path, title: str) -> None:
    """The panels as one file that needs nothing else: point at a bar to see what it is and why it waited.

    Raises: OSError.
    """
    path.write_text(page(panels, title), encoding="utf-8")
