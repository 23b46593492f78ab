"""Gantt charts: every bar once and in its place, every text escaped, no line too long, and told apart without colours."""

import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from io import BytesIO, TextIOWrapper
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest

from minimind_tron.gantt import draw_html, draw_png, draw_text, panel_of
from minimind_tron.panels import LOOKS, Bar, Panel, Row, chunk_places, longest, mark_height, ticks
from minimind_tron.parallel.schedules import NAMES, Action, Costs, Span, Timeline, build, simulate

COSTS = Costs()
CASES = [(1, 1, 1), (1, 1, 2), (1, 5, 2), (2, 1, 3), (4, 8, 2), (3, 7, 3)]
NASTY = "<b>&\"'</script>$title é"


def timelines(stages: int, microbatches: int, virtual: int, costs: Costs = COSTS) -> list[Timeline]:
    chunks = {"interleaved": virtual, "zb-v": 2}
    return [simulate(build(name, stages, chunks.get(name, 1), microbatches), costs) for name in NAMES]


def panels_of(stages: int, microbatches: int, virtual: int, costs: Costs = COSTS) -> list[Panel]:
    return [panel_of(timeline) for timeline in timelines(stages, microbatches, virtual, costs)]


MEASURED = Panel(
    NASTY,
    NASTY,
    (
        Row(
            NASTY, (Bar("F", NASTY, 0.0, 1.3, (("microbatch", NASTY), ("chunk", NASTY), (NASTY, NASTY))), Bar("sum", "", 1.5, 2.0))
        ),
        Row("rank 1", ()),
    ),
    "ms",
)
EMPTY = Panel("nothing", "at all", (), "ms")


# From a simulation


@pytest.mark.parametrize(("stages", "microbatches", "virtual"), CASES)
def test_bars_are_the_spans_and_do_not_overlap(stages: int, microbatches: int, virtual: int) -> None:
    for timeline in timelines(stages, microbatches, virtual, Costs(1.0, 1.1, 0.7, 0.2)):
        panel = panel_of(timeline)
        assert panel.end == timeline.makespan
        assert len(panel.rows) == stages
        for row, spans in zip(panel.rows, timeline.spans, strict=True):
            assert [(b.kind, b.label, b.start, b.end) for b in row.bars] == [
                (s.action.kind, str(s.action.microbatch), s.start, s.end) for s in spans
            ]
            assert all(before.end <= after.start for before, after in pairwise(row.bars))
            assert row.alive[-1][1] == 0


def test_panel_says_its_figures() -> None:
    panel = panels_of(4, 8, 2)[NAMES.index("interleaved")]
    assert re.findall(r"\d+", panel.title) == ["4", "2", "8"]
    for figure in ("28.5", "15.8%", "5.5, 4.5, 3.5, 2.5"):
        assert figure in panel.subtitle
    assert max(count for _, count in panel.rows[0].alive) == 5.5, "in whole stages, not in chunks"


def test_details_say_why_a_bar_waited() -> None:
    rows = panels_of(2, 2, 2)[NAMES.index("1f1b")].rows
    assert rows[0].bars[0].details == (
        ("stage", "0"),
        ("action", "forward"),
        ("microbatch", "0"),
        ("chunk", "0"),
        ("time", "0 - 1"),
        ("not earlier, because", "it is the first"),
    )
    assert rows[0].bars[1].details[-1][1] == "the stage was busy"
    assert rows[0].bars[2].details[-1][1] == "it waited for backward of microbatch 0, chunk 1, on stage 1"
    assert rows[1].bars[0].details[-1][1] == "it waited for forward of microbatch 0, chunk 0, on stage 0"


def test_reasons_follow_the_simulation() -> None:
    for timeline in timelines(3, 4, 2):
        for row, spans in zip(panel_of(timeline).rows, timeline.spans, strict=True):
            for bar, span in zip(row.bars, spans, strict=True):
                assert ("waited for" in dict(bar.details)["not earlier, because"]) == (span.waited_for is not None)


# Shared by the drawings


def test_chunks_are_counted_as_numbers_and_bars_without_one_do_not_count() -> None:
    def bar(chunk: str | None) -> Bar:
        return Bar("F", "", 0, 1, (("chunk", chunk),) if chunk else ())

    row = Row("r", tuple(bar(chunk) for chunk in ("2", "10", None, "2")))
    assert chunk_places(row) == ([0, 1, 0, 0], 2)
    heights = [mark_height(place, 4) for place in (1, 2, 3)]
    assert 0.5 < heights[0] < heights[1] < heights[2] < 1


@pytest.mark.parametrize("end", [1e-6, 0.3, 1.0, 7.0, 33.0, 99.9, 12345.0])
def test_ticks_are_few_and_inside(end: float) -> None:
    times = ticks(end)
    assert times[0] == 0
    assert 4 <= len(times) <= 14
    assert times[-1] <= end * 1.001


# As text


def test_text_of_a_small_case() -> None:
    timeline = next(t for t in timelines(2, 3, 2) if t.schedule.name == "1f1b")
    assert draw_text([panel_of(timeline)], 60, ascii_only=False) == (
        "1f1b   p = 2, v = 1, m = 3\n"
        "makespan 12, bubble 25.0%, most activations alive per stage:\n"
        "2, 1\n"
        "stage 0 │F0F1    B0██F2B1██  B2██│\n"
        "stage 1 │  F0B0██F1B1██F2B2██    │\n"
        "\n"
        "F░ forward; B█ backward; blank: bubble\n"
    )


def test_text_in_ascii_and_with_chunks() -> None:
    panel = panels_of(2, 2, 2)[NAMES.index("zb-v")]
    lines = draw_text([panel], 60, ascii_only=True).splitlines()
    assert [line for line in lines if "|" in line] == [
        "stage 0 |F0F1  f0i0w0f1i1w1I0W0I1W1|",
        "stage 1 |  F0f0F1f1i0w0I0i1I1W0w1W1|",
    ]
    assert "small letters" in lines[-1]


def test_ascii_where_stdout_takes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = [*panels_of(2, 3, 2), MEASURED]
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    narrow = draw_text(panels, 80)
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding="utf-8"))
    full = draw_text(panels, 80)
    assert narrow.isascii()
    assert not full.isascii()
    assert len(narrow.splitlines()) == len(full.splitlines())


@pytest.mark.parametrize("width", [20, 21, 33, 40, 57, 80, 100, 132, 200, 399, 400])
def test_no_line_is_wider_than_asked(width: int) -> None:
    mixed = Costs(1.0, 1.1, 0.7, 0.2)
    groups = [panels_of(*case) for case in CASES] + [panels_of(*case, mixed) for case in CASES]
    groups += [panels_of(8, 16, 4), panels_of(12, 3, 2), [MEASURED, EMPTY], [EMPTY], []]
    for panels in groups:
        for ascii_only in (True, False):
            assert max(map(len, draw_text(panels, width, ascii_only).splitlines()), default=0) <= width


def cells(line: str) -> str:
    return line.split("│")[1]


def test_panels_share_a_scale_and_narrow_ones_keep_the_shares_of_time() -> None:
    timeline = simulate(build("interleaved", 8, 4, 16), COSTS)
    other = simulate(build("gpipe", 8, 1, 16), COSTS)
    text = draw_text([panel_of(timeline), panel_of(other)], 80, ascii_only=False)
    rows = [cells(line) for line in text.splitlines() if "│" in line]
    assert len(rows[0]) / len(rows[8]) == pytest.approx(timeline.makespan / other.makespan, abs=0.02)
    for row in rows[:8]:
        assert row.count("█") / len(row) == pytest.approx(32 / timeline.makespan, abs=0.03), "backward, 2 x 16 of the time"
        assert row.count("░") / len(row) == pytest.approx(16 / timeline.makespan, abs=0.03), "forward, half of that"


def test_a_number_is_never_cut_into_another() -> None:
    text = draw_text([panels_of(2, 12, 2)[NAMES.index("gpipe")]], 100, ascii_only=False)
    found = re.findall(r"F(\d*)", next(line for line in text.splitlines() if "│" in line))
    assert found == [*map(str, range(10)), "", ""]


# As a page


class Page(HTMLParser):
    """What a page is made of: its tags with attributes, its texts, and whether its tags are nested as they should be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def bars(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == "g" and (attrs.get("class") or "").startswith("bar ")]


@pytest.mark.parametrize(("stages", "microbatches", "virtual"), CASES)
def test_page_has_every_action_once_with_its_details(tmp_path: Path, stages: int, microbatches: int, virtual: int) -> None:
    panels = panels_of(stages, microbatches, virtual)
    draw_html(panels, tmp_path / "a.html", "schedules")
    page = Page(tmp_path / "a.html")
    assert page.open == []
    expected = [(bar.label, "\n".join(f"{n}: {v}" for n, v in bar.details)) for p in panels for r in p.rows for bar in r.bars]
    assert [(bar["data-microbatch"], bar["aria-label"]) for bar in page.bars] == expected
    for panel in panels:
        names = [bar.details[:4] for row in panel.rows for bar in row.bars]
        assert len(set(names)) == len(names)


def test_bars_of_the_page_lie_where_they_ran(tmp_path: Path) -> None:
    panels = panels_of(3, 4, 2)
    draw_html(panels, tmp_path / "a.html", "schedules")
    tags = Page(tmp_path / "a.html").tags
    after = [tags[i + 1][1] for i, (_, attrs) in enumerate(tags) if (attrs.get("class") or "").startswith("bar ")]
    places = [(float((a["x"] or "").rstrip("%")), float((a["width"] or "").rstrip("%"))) for a in after]
    scale = 100 / longest(panels)
    bars = [bar for panel in panels for row in panel.rows for bar in row.bars]
    expected = [(bar.start * scale, (bar.end - bar.start) * scale) for bar in bars]
    assert [x for pair in places for x in pair] == pytest.approx([x for pair in expected for x in pair], abs=1e-3)


def test_page_escapes_every_text_and_fetches_nothing(tmp_path: Path) -> None:
    draw_html([MEASURED, EMPTY], tmp_path / "a.html", NASTY)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    page = Page(tmp_path / "a.html")
    assert "<b>" not in text
    assert text.count("</script>") == 1
    assert page.text["title"] == [NASTY]
    assert page.text["h2"] == [NASTY, "nothing"]
    assert page.bars[0]["data-microbatch"] == NASTY
    assert page.bars[0]["aria-label"] == f"microbatch: {NASTY}\nchunk: {NASTY}\n{NASTY}: {NASTY}"
    assert "http" not in text
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any(name in ("src", "href") for _, attrs in page.tags for name in attrs)
    assert set(re.findall(r"url\((.)", text)) == {"#"}


def test_page_has_a_legend_and_a_look_for_every_kind(tmp_path: Path) -> None:
    draw_html([*panels_of(2, 2, 2), MEASURED], tmp_path / "a.html", "t")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    for kind, look in LOOKS.items():
        assert f"> {look.words}</span>" in text
        assert f"--{kind}: {look.face}" in text.replace("--W: #fff;", "--W: #ffffff;"), "the style sheet has the faces of the image"
    assert "> sum</span>" in text
    assert "prefers-color-scheme: dark" in text


def test_script_is_javascript(tmp_path: Path) -> None:
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, and nothing else here reads JavaScript")
    draw_html(panels_of(2, 2, 2), tmp_path / "a.html", "t")
    (tmp_path / "a.js").write_text("".join(Page(tmp_path / "a.html").text["script"]))
    subprocess.run([node, "--check", tmp_path / "a.js"], check=True, timeout=60)


# As an image


def test_png_is_an_image_of_these_panels(tmp_path: Path) -> None:
    sizes = {}
    for name, panels in {"one": panels_of(4, 8, 2)[:1], "all": panels_of(4, 8, 2), "odd": [MEASURED, EMPTY]}.items():
        draw_png(panels, tmp_path / f"{name}.picture")
        picture = matplotlib.image.imread(tmp_path / f"{name}.picture", format="png")
        sizes[name] = picture.shape[:2]
        inked = (picture[..., :3].min(-1) < 0.5).mean()
        assert 0.003 < inked < 0.5, "neither blank nor black"
    assert 400 <= sizes["one"][0] <= 800
    assert 3.5 * sizes["one"][0] <= sizes["all"][0] <= 5 * sizes["one"][0]
    assert all(1200 <= width <= 4000 for _, width in sizes.values())


def test_looks_survive_a_black_and_white_printer() -> None:
    def lightness(face: str) -> float:
        red, green, blue = (int(face[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    looks = sorted((look for look in LOOKS.values() if not look.hatch), key=lambda look: lightness(look.face))
    assert all(lightness(b.face) - lightness(a.face) > 0.2 for a, b in pairwise(looks))
    assert len({look.hatch for look in LOOKS.values() if look.hatch}) == len([look for look in LOOKS.values() if look.hatch])
    assert len({look.block for look in LOOKS.values()}) == len({look.ascii for look in LOOKS.values()}) == len(LOOKS)


def test_a_bar_without_length_is_drawn_too(tmp_path: Path) -> None:
    spans = ((Span(Action("F", 0, 0), 0.0, 1.0, None), Span(Action("B", 0, 0), 1.0, 1.0, None)),)
    panel = panel_of(Timeline(build("gpipe", 1, 1, 1), spans))
    draw_png([panel], tmp_path / "a.png")
    draw_html([panel], tmp_path / "a.html", "t")
    assert len(Page(tmp_path / "a.html").bars) == 2
    assert "F0" in draw_text([panel], 40, ascii_only=True)


def test_large_panels_are_drawn_in_seconds(tmp_path: Path) -> None:
    panel = panel_of(simulate(build("interleaved", 8, 4, 16), COSTS))
    assert sum(len(row.bars) for row in panel.rows) == 1024
    began = time.monotonic()
    draw_text([panel] * 5, 120)
    draw_html([panel] * 5, tmp_path / "a.html", "t")
    assert time.monotonic() - began < 10
    draw_png([panel], tmp_path / "a.png")
    assert time.monotonic() - began < 30
    assert (tmp_path / "a.html").stat().st_size < 4e6
