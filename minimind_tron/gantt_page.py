"""Gantt charts as one HTML file that fetches nothing: drawn as SVG, with a few lines of script for pointing and zooming.

Times are shares of the drawing's width, so that zooming is one width. Without script, all is there but the zoom and the box of
details, which then are read as the label of each bar.
"""

from collections.abc import Sequence
from html import escape
from string import Template

from minimind_tron.panels import (
    LOOKS,
    Bar,
    Panel,
    Row,
    chunk_places,
    has_chunks,
    kinds_in,
    longest,
    look_of,
    mark_height,
    most_alive,
    number,
    ticks,
)

# Pixels: a row, the bar in it, and the curve of activations under the bar.
_ROW, _BAR, _ALIVE = 36, 21, 10
_NAME_CHARACTERS = 24

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --text: #111; --soft: #666; --edge: #222; --alive: #aaa;
  --F: #dbe8f5; --B: #24527e; --I: #6f9cc9; --W: #fff; --other: #d0d0d0; --on-light: #000; --on-B: #fff; --zoom: 1 }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --text: #eee; --soft: #aaa; --edge: #000; --alive: #777;
  --F: #dbe8f5; --B: #2f6ea8; --I: #86b0da; --W: #f4f4f4; --other: #b0b0b0 } }
body { background: var(--ground); color: var(--text); font: 14px/1.4 system-ui, sans-serif; margin: 1.2em }
h1 { font-size: 1.3em } h2 { font-size: 1em; margin: 0 } p { margin: 0 0 .4em; color: var(--soft) }
main { overflow-x: auto } section { margin-bottom: 1.6em; width: calc(var(--zoom) * 100%); min-width: 600px }
h2, p { position: sticky; left: 0; width: max-content; max-width: 90vw; white-space: pre-wrap }
.chart { display: flex } .chart > svg { flex: 1; margin-right: 3.5em; overflow: visible }
.names { position: sticky; left: 0; z-index: 1; background: var(--ground) }
.names { width: ${names}ch; padding-right: .6em; text-align: right }
.names div { height: ${row}px; overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
text { font-size: 11px; text-anchor: middle; fill: var(--on-light); pointer-events: none }
.axis text, .most { fill: var(--soft) } .most { text-anchor: start } .axis line { stroke: var(--soft) }
.bar, .key rect { stroke: var(--edge); stroke-width: .6 } .bar text, .mark { stroke: none }
.F { fill: var(--F) } .B { fill: var(--B) } .I { fill: var(--I) } .W { fill: url(#hatch) } .other { fill: url(#cross) }
.mark { fill: var(--on-light) } .B .mark, .B text { fill: var(--on-B) }
.W text, .other text, .W .mark, .other .mark { paint-order: stroke; stroke: var(--W); stroke-width: 4px }
.alive path { fill: var(--alive) }
.lit .bar { opacity: .3 } .lit .bar.mate { opacity: 1 } .bar:focus { outline: none } .bar.here { stroke: #d00; stroke-width: 2.5 }
.key { display: inline-block; margin-right: 1.4em; white-space: nowrap } .key svg { vertical-align: -2px }
#tip { position: fixed; display: none; padding: .5em .8em; background: var(--ground); border: 1px solid var(--soft);
  border-radius: 4px; white-space: pre-wrap; pointer-events: none; max-width: 28em; box-shadow: 0 2px 8px #0006; z-index: 2 }
</style>
</head>
<body>
<svg width="0" height="0" style="position: absolute" aria-hidden="true"><defs>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="5" height="5" style="fill: var(--W)"/><rect width="1.2" height="5" style="fill: #000"/></pattern>
<pattern id="cross" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="5" height="5" style="fill: var(--other)"/><path d="M0 0H5M0 0V5" stroke="#000"/></pattern></defs></svg>
<h1>$title</h1>
<div>$legend <label class="key">zoom <input id="zoom" type="range" min="1" max="12" step="0.25" value="1"></label></div>
<p>Point at a bar, or walk through them with Tab and the arrow keys: what it is, when it ran, and what it waited for.</p>
<main>
$panels
</main>
<div id="tip" role="status"></div>
<script>
"use strict";
const bars = [...document.querySelectorAll(".bar")], rows = [...document.querySelectorAll(".row")];
const tip = document.getElementById("tip"), zoom = document.getElementById("zoom"), mates = new Map();
for (const bar of bars) {
  const name = bar.dataset.microbatch;
  if (name !== undefined) mates.has(name) ? mates.get(name).push(bar) : mates.set(name, [bar]);
}
let lit = [];
function hide() {
  for (const bar of lit) bar.classList.remove("mate", "here");
  lit = [];
  document.body.classList.remove("lit");
  tip.style.display = "none";
}
function show(bar) {
  hide();
  lit = mates.get(bar.dataset.microbatch) || [bar];
  for (const mate of lit) mate.classList.add("mate");
  bar.classList.add("here");
  document.body.classList.add("lit");
  tip.textContent = bar.getAttribute("aria-label");
  tip.style.display = "block";
  const at = bar.getBoundingClientRect(), box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(at.left, innerWidth - box.width - 8)) + "px";
  tip.style.top = (at.bottom + 8 + box.height < innerHeight ? at.bottom + 8 : Math.max(4, at.top - box.height - 8)) + "px";
}
function share(bar, name) { return parseFloat(bar.firstElementChild.getAttribute(name)); }
function next(bar, key) {
  if (key === "ArrowLeft") return bar.previousElementSibling;
  if (key === "ArrowRight") return bar.nextElementSibling;
  const step = { ArrowUp: -1, ArrowDown: 1 }[key], row = step && rows[rows.indexOf(bar.parentNode) + step];
  const far = (other) => Math.abs(share(other, "x") - share(bar, "x"));
  return row ? [...row.querySelectorAll(".bar")].reduce((a, b) => (a && far(a) <= far(b) ? a : b), null) : null;
}
const barAt = (event) => event.target.closest && event.target.closest(".bar");
function onBar(event) { const bar = barAt(event); if (bar) show(bar); else hide(); }
document.addEventListener("mouseover", onBar);
document.addEventListener("focusin", onBar);
document.addEventListener("focusout", hide);
document.addEventListener("scroll", hide, true);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
  const bar = barAt(event), other = bar && next(bar, event.key);
  if (other && other.classList.contains("bar")) {
    event.preventDefault();
    other.focus();
    show(other);
  }
});
function fit() {
  document.documentElement.style.setProperty("--zoom", zoom.value);
  const drawing = document.querySelector(".chart > svg"), width = drawing ? drawing.getBoundingClientRect().width : 0;
  for (const bar of bars) {
    const text = bar.querySelector("text");
    if (text) text.style.display = share(bar, "width") / 100 * width < 7 * text.textContent.length + 2 ? "none" : "";
  }
}
zoom.addEventListener("input", fit);
window.addEventListener("resize", fit);
fit();
</script>
</body>
</html>
""")


def page(panels: Sequence[Panel], title: str) -> str:
    """The panels under each other on one time scale, as the text of a page."""
    end, most = longest(panels), most_alive(panels)  # the scales of all panels
    names = max((len(row.name) for panel in panels for row in panel.rows), default=0)
    return _PAGE.substitute(
        title=escape(title),
        names=min(names, _NAME_CHARACTERS) + 1,
        row=_ROW,
        legend=_legend(panels),
        panels="\n".join(_section(panel, end, most) for panel in panels),
    )


def _legend(panels: Sequence[Panel]) -> str:
    def key(kind: str) -> str:
        box = f'<svg width="26" height="14"><rect class="{_class(kind)}" x="1" y="1" width="24" height="12"/></svg>'
        return f'<span class="key">{box} {escape(look_of(kind).words)}</span>'

    notes = ["blank: bubble"]
    notes += ["grey curve: activations alive, in whole stages; the most at the right"] if most_alive(panels) else []
    notes += ["line in a bar: a later chunk, the higher the later"] if has_chunks(panels) else []
    return "\n".join([key(kind) for kind in kinds_in(panels)] + [f'<span class="key">{note}</span>' for note in notes])


def _class(kind: str) -> str:
    return kind if kind in LOOKS else "other"


def _section(panel: Panel, end: float, most: float) -> str:
    height = _ROW * len(panel.rows)
    names = "".join(f"<div>{escape(row.name)}</div>" for row in panel.rows) + f"<div>{escape(panel.unit)}</div>"
    rows = "\n".join(_row(row, y, end, _alive(row, panel.end, end, most)) for y, row in enumerate(panel.rows))
    times = [(number(time), _share(time, end)) for time in ticks(end)]
    axis = "".join(f'<line x1="{x}" x2="{x}" y2="4"/><text x="{x}" y="16">{time}</text>' for time, x in times)
    return f"""<section>
<h2>{escape(panel.title)}</h2>
<p>{escape(panel.subtitle)}</p>
<div class="chart"><div class="names">{names}</div>
<svg height="{height + 22}" role="group" aria-label="{escape(panel.title)}">
{rows}
<g class="axis" transform="translate(0 {height})"><line x1="0" x2="100%"/>{axis}</g>
</svg></div>
</section>"""


def _share(time: float, end: float) -> str:
    return f"{100 * time / end:.4f}".rstrip("0").rstrip(".") + "%"


def _row(row: Row, y: int, end: float, alive: str) -> str:
    places, count = chunk_places(row)
    # One bar of a row is reached by Tab, the others from there by arrow keys.
    bars = [
        _bar(bar, mark_height(place, count) if place else None, count > 1, end, 0 if i == 0 else -1)
        for i, (bar, place) in enumerate(zip(row.bars, places, strict=True))
    ]
    lines = "\n".join([*bars, alive])
    return f'<g class="row" transform="translate(0 {y * _ROW})">\n{lines}\n</g>'


def _bar(bar: Bar, mark: float | None, lower: bool, end: float, tab: int) -> str:
    details = dict(bar.details)
    group = f' data-microbatch="{escape(details["microbatch"])}"' if "microbatch" in details else ""
    label = "&#10;".join(f"{escape(name)}: {escape(value)}" for name, value in bar.details) or escape(f"{bar.kind} {bar.label}")
    length = bar.end - bar.start
    parts = [f'<rect x="{_share(bar.start, end)}" width="{_share(length, end)}" height="{_BAR}"/>']
    if mark is not None:
        place = f'x="{_share(bar.start + 0.15 * length, end)}" width="{_share(0.7 * length, end)}"'
        parts.append(f'<rect class="mark" {place} y="{_BAR * (1 - mark) - 1:.1f}" height="1.6"/>')
    if bar.label:
        middle = _share(bar.start + length / 2, end)
        parts.append(f'<text x="{middle}" y="{_BAR - 1.5 if lower else _BAR - 5}">{escape(bar.label)}</text>')
    return f'<g class="bar {_class(bar.kind)}" tabindex="{tab}" role="img"{group} aria-label="{label}">{"".join(parts)}</g>'


def _alive(row: Row, last: float, end: float, most: float) -> str:
    if not row.alive or not most:
        return ""
    path, scale = "M0 1", 1000 / end
    for time, count in row.alive:
        path += f"H{time * scale:.2f}V{1 - count / most:.3f}"
    box = f'class="alive" y="{_BAR + 2}" width="100%" height="{_ALIVE}" viewBox="0 0 1000 1" preserveAspectRatio="none"'
    peak = number(max(count for _, count in row.alive))
    note = f'<text class="most" x="100%" dx="6" y="{_BAR + 2 + _ALIVE}">{peak}</text>'
    return f'<svg {box}><path d="{path}H{last * scale:.2f}V1Z"/></svg>{note}'
