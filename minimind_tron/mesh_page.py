"""Which rank holds what as one page of its own: the grid, who holds the same, every rank in full, and every process group."""

from collections.abc import Iterable, Sequence
from html import escape

from minimind_tron.cut_config import CutConfig
from minimind_tron.holdings import Holding
from minimind_tron.sharing import amount, extent, facts, sentences, size, subtitle, title

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #c9d1d9; --cell: #eef3f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --cell: #1c2733; } }
body { color: var(--ink); background: var(--paper); font: 14px/1.45 system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; }
td, th { border: 1px solid var(--line); padding: .3em .6em; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.rank { background: var(--cell); }
td.rank b { font-size: 1.2em; }
details { margin: .3em 0; }
.wide { overflow-x: auto; }
"""


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _grid(config: CutConfig, holdings: Sequence[Holding]) -> str:
    """A row for every place in dp and pp, a column for every place in cp and tp."""
    degrees = config.mesh.degrees
    across = degrees["cp"] * degrees["tp"]
    heads = [f"cp {column // degrees['tp']}, tp {column % degrees['tp']}" for column in range(across)]
    rows = [_row(["", *heads], "th")]
    for begin in range(0, len(holdings), across):
        line = holdings[begin : begin + across]
        cells = [f'<td class="rank"><b>{each.rank}</b><br>{escape(", ".join(each.stage))}</td>' for each in line]
        rows.append(f"<tr><th>dp {line[0].at('dp')}, pp {line[0].at('pp')}</th>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _rank(holding: Holding) -> str:
    place = ", ".join(f"{name} {at}" for name, at in holding.coordinates)
    kept = {"parameters": holding.parameters, "gradients": holding.gradients, "optimizer states": holding.states}
    kept |= {"masters": holding.masters} if holding.masters.bytes else {}
    lines = [f"{name}: {value}" for name, value in facts(holding).items()]
    lines += [f"{name}: {amount(held)}" for name, held in kept.items()]
    parts = [_row(["parameter", "computes with", "keeps of the weight", "of the gradient", "of the optimizer states"], "th")]
    for part in holding.parts:
        ranges = (part.local, part.weight, part.gradient, part.state)
        parts.append(_row([escape(part.name), *(escape(extent(pieces, part.shape)) for pieces in ranges)]))
    summary = f"rank {holding.rank}: {escape(place)}; {size(holding.bytes)}"
    facts_ = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f"<details><summary>{summary}</summary><ul>{facts_}</ul><div class='wide'><table>{''.join(parts)}</table></div></details>"
    )


def _groups(groups: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    items = "".join(f"<li>{escape(name)}: {', '.join(map(str, ranks))}</li>" for name, ranks in groups)
    return f"<ol>{items}</ol>" if items else "<p>None: one rank talks to nobody.</p>"


def page(config: CutConfig, holdings: Sequence[Holding], groups: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """A page that needs no other file. Cost: a row of a table for every parameter of every rank."""
    name = escape(title(config))
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(config, holdings))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head>
<body>
<h1>{name}</h1>
<p>{escape(subtitle(config))}</p>
<h2>The grid</h2>
<p>Ranks are numbered along tp first, then cp, pp, dp.</p>
{_grid(config, holdings)}
<h2>Who holds the same</h2>
<ul>{said}</ul>
<h2>Every rank</h2>
{"".join(map(_rank, holdings))}
<h2>Process groups, in the order in which every rank makes them</h2>
{_groups(groups)}
</body>
</html>
"""
