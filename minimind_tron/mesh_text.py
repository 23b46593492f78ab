"""Which rank holds what, drawn for a terminal: the grid, what each coordinate decides, bytes, groups; or one rank in full."""

import textwrap
from collections.abc import Sequence

from minimind_tron.cut_config import CutConfig
from minimind_tron.holdings import Amount, Holding
from minimind_tron.mesh import AXES
from minimind_tron.sharing import alike, amount, decided, extent, facts, ranks_in_words, sentences, size, subtitle, title

# Rows of a table and lines of an axis before the rest is left to ``--rank`` and the page.
MOST_ROWS, MOST_LINES = 16, 8
Group = tuple[str, tuple[int, ...]]
KEPT = ("parameters", "gradients", "states", "masters")


def draw(config: CutConfig, holdings: Sequence[Holding], groups: Sequence[Group], width: int) -> str:
    """The whole mesh, at most ``width`` columns wide as far as ranks' numbers allow."""
    blocks = [
        [title(config), *_wrapped(subtitle(config), width)],
        ["Ranks are numbered along tp first, then cp, pp, dp:", *_grid(config, holdings, width)],
        _decisions(holdings, width),
        [line for sentence in sentences(config, holdings) for line in _wrapped(sentence, width)],
        _amounts(holdings),
        _groups(groups, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def draw_rank(config: CutConfig, holding: Holding, width: int) -> str:
    """One rank in full: where it is, what it computes with, what it keeps, and every parameter's ranges."""
    place = ", ".join(f"{name} {at}" for name, at in holding.coordinates)
    lines = [title(config), *_wrapped(subtitle(config), width), "", f"Rank {holding.rank}: {place}"]
    for name, value in facts(holding).items():
        lines += _wrapped(f"{name} {value}", width, "  ")
    groups = {axis.name: axis.ranks for axis in holding.axes if axis.size > 1}
    lines += [
        line for name, ranks in groups.items() for line in _wrapped(f"{name} group: ranks {ranks_in_words(ranks)}", width, "  ")
    ]
    lines += ["", *(f"{name:<10}  {amount(held)}" for name, held in _kept(holding).items()), ""]
    for part in holding.parts:
        held = {"weight": part.weight, "gradient": part.gradient, "optimizer states": part.state}
        lines.append(f"{part.name}: {extent(part.local, part.shape)}")
        differing = [f"{name} {extent(pieces, part.shape)}" for name, pieces in held.items() if pieces != part.local]
        lines += _wrapped("keeps " + "; ".join(differing), width, "  ") if differing else []
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _grid(config: CutConfig, holdings: Sequence[Holding], width: int) -> list[str]:
    """A row for every place in dp and pp, a column for every place in cp and tp, as many as there is room for."""
    degrees = config.mesh.degrees
    digits = max(len(str(len(holdings) - 1)), len(f"tp {degrees['tp'] - 1}"))
    across, down = degrees["cp"] * degrees["tp"], degrees["dp"] * degrees["pp"]
    labels = [f"dp {row // degrees['pp']}  pp {row % degrees['pp']}" for row in range(down)]
    margin = max(map(len, labels))
    room = max(1, (width - margin - 5) // (digits + 3))
    columns = list(range(across)) if across <= room else [*range(max(1, room - 1)), across - 1]

    def line(label: str, cells: Sequence[str]) -> str:
        parts = [f"{cell:>{digits}}" for cell in cells]
        if len(columns) < across:
            parts.insert(len(parts) - 1, "...")
        return f"{label:<{margin}} | {'  '.join(parts)}".rstrip()

    heads = [line("", [f"tp {column % degrees['tp']}" for column in columns])]
    if degrees["cp"] > 1:
        heads.insert(0, line("", [f"cp {column // degrees['tp']}" for column in columns]))
    rows = range(down) if down <= MOST_ROWS else [*range(MOST_ROWS - 1), down - 1]
    drawn = [line(labels[row], [str(row * across + column) for column in columns]) for row in rows]
    if len(drawn) < down:
        drawn.insert(-1, f"{'...':<{margin}} |")
    return [*heads, "-" * max(map(len, [*heads, *drawn])), *drawn]


def _decisions(holdings: Sequence[Holding], width: int) -> list[str]:
    """What the ranks of each coordinate compute with because of it."""
    lines = []
    for axis in AXES:
        places = decided(holdings, axis)
        if not any(found for _, found in places):
            continue
        shown = places if len(places) <= MOST_LINES else [*places[: MOST_LINES - 1], places[-1]]
        for place, found in shown:
            if len(shown) < len(places) and place == places[-1][0]:
                lines.append("...")
            lines += _wrapped(f"{axis} {place}: " + "; ".join(f"{name} {value}" for name, value in found.items()), width)
    return lines


def _kept(holding: Holding) -> dict[str, Amount]:
    return {name: getattr(holding, name) for name in KEPT if getattr(holding, name).bytes}


def _amounts(holdings: Sequence[Holding]) -> list[str]:
    """Elements that ranks keep, and the bytes of all; ranks with the same are one row."""
    groups = alike(holdings, lambda holding: tuple(getattr(holding, name) for name in KEPT))
    names = [name for name in KEPT if any(getattr(holding, name).bytes for holding in holdings)]
    rows = [["ranks", *("optimizer states" if name == "states" else name for name in names), "in all"]]
    for ranks in groups[:MOST_ROWS]:
        one = holdings[ranks[0]]
        rows.append([_short(ranks), *(f"{getattr(one, name).elements:,}" for name in names), size(one.bytes)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
    left = len(groups) - MOST_ROWS
    return lines + ([f"... and {left} more kinds of rank; --rank shows one, --html all"] if left > 0 else [])


def _short(ranks: Sequence[int]) -> str:
    """Ranks in few letters: the first ones, and how many."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)})"


def _groups(groups: Sequence[Group], width: int) -> list[str]:
    """Every process group, in the order in which all ranks make them."""
    by_axis: dict[str, list[tuple[int, ...]]] = {}
    for name, line in groups:
        by_axis.setdefault(name, []).append(line)
    lines = ["Process groups, in the order in which every rank makes them:"] if by_axis else []
    for name, members in by_axis.items():
        shown = members if len(members) <= MOST_LINES else [*members[: MOST_LINES - 1], members[-1]]
        words = [f"({_short(line)})" for line in shown]
        if len(shown) < len(members):
            words.insert(-1, "...")
        lines += _wrapped(f"{name}: {' '.join(words)}" + (f", {len(members)} in all" if len(shown) < len(members) else ""), width)
    return lines
