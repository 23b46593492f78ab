"""What a Gantt chart is drawn from: plain records, which a simulation or a measured trace fills, and what all drawings share."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One piece of work: F, B, I, W or another word, a short label, and details for the reader who points at it.

    Bars with the same "microbatch" in their details light up together; a "chunk" there gives the bar the mark of that chunk.
    """

    kind: str
    label: str
    start: float
    end: float
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """What a stage or rank did, and how many activations it kept, as (time, whole stages' worth from then on)."""

    name: str
    bars: tuple[Bar, ...]
    alive: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One drawing; the time of all rows begins at 0 and is counted in ``unit``."""

    title: str
    subtitle: str
    rows: tuple[Row, ...]
    unit: str

    @property
    def end(self) -> float:
        """The end of the last bar."""
        return max((bar.end for row in self.rows for bar in row.bars), default=0.0)


@dataclass(frozen=True)
class Look:
    """How a kind of work is called and drawn."""

    words: str
    block: str
    ascii: str
    face: str
    ink: str = "black"
    hatch: str = ""


# Told apart by lightness and hatching; the style sheet of gantt_page has the same faces.
LOOKS = {
    "F": Look("forward", "░", "-", "#dbe8f5"),
    "B": Look("backward", "█", "#", "#24527e", "white"),
    "I": Look("input gradient", "▓", "=", "#6f9cc9"),
    "W": Look("weight gradient", "▒", "+", "#ffffff", hatch="////"),
}


def look_of(kind: str) -> Look:
    """The look of a kind; words that are not known share one."""
    return LOOKS.get(kind, Look(kind, "▚", "%", "#d0d0d0", hatch="xxxx"))


def number(value: float) -> str:
    """A time or an amount for the reader."""
    return f"{value:.6g}"


def bars_of(panels: Sequence[Panel]) -> Iterator[Bar]:
    """Every bar of some panels."""
    return (bar for panel in panels for row in panel.rows for bar in row.bars)


def kinds_in(panels: Sequence[Panel]) -> list[str]:
    """The kinds that occur, the known ones first."""
    there = {bar.kind for bar in bars_of(panels)}
    return [kind for kind in LOOKS if kind in there] + sorted(there - set(LOOKS))


def longest(panels: Sequence[Panel]) -> float:
    """The end of the panel that ends last: the length of the common time scale, more than 0."""
    return max((panel.end for panel in panels), default=0.0) or 1.0


def shortest(panels: Sequence[Panel]) -> float:
    """The length of the shortest bar that has one."""
    lengths = (bar.end - bar.start for bar in bars_of(panels))
    return min((length for length in lengths if length > 0), default=longest(panels))


def most_alive(panels: Sequence[Panel]) -> float:
    """The most activations that any row keeps: the height of the common scale."""
    return max((count for panel in panels for row in panel.rows for _, count in row.alive), default=0.0)


def chunk_places(row: Row) -> tuple[list[int], int]:
    """For every bar, which of its row's chunks it belongs to, counted from 0; and how many chunks the row has."""
    chunks = [dict(bar.details).get("chunk", "") for bar in row.bars]
    order = sorted(set(chunks) - {""}, key=lambda chunk: (len(chunk), chunk))
    places = {chunk: place for place, chunk in enumerate(order)}
    return [places.get(chunk, 0) for chunk in chunks], len(order)


def has_chunks(panels: Sequence[Panel]) -> bool:
    """Whether any row has more chunks than one, so that drawings must tell them apart."""
    return any(chunk_places(row)[1] > 1 for panel in panels for row in panel.rows)


def mark_height(place: int, count: int) -> float:
    """How high in its bar the mark of a chunk is, from 0 to 1: above the label, and the first chunk has none."""
    return 0.86 if count < 3 else 0.62 + 0.26 * (place - 1) / (count - 2)


def ticks(end: float, most: int = 12) -> list[float]:
    """Round times from 0 to the end, about ``most`` of them at most."""
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10, 20) if (step := factor * power) >= rough)
    return [i * step for i in range(int(end / step * 1.001) + 1)]
