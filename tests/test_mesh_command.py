"""minimind-tron mesh: the drawing of a mesh in a terminal, one rank in full, and what is refused."""

import dataclasses
import html.parser
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimind_tron.commands import mesh as command
from minimind_tron.config import BatchConfig, ModelConfig
from minimind_tron.errors import TronError
from minimind_tron.holdings import holdings_of
from minimind_tron.layout import layout_of
from minimind_tron.mesh import Mesh, build_mesh, groups_in_order, view_mesh
from minimind_tron.mesh_page import page
from minimind_tron.mesh_text import draw, draw_rank
from minimind_tron.model import build_model
from minimind_tron.sharing import decided
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig
from minimind_tron.view_config import MeshCommandConfig
from tests.proving import Pools

SMALL = ModelConfig(vocab_size=61, hidden_size=64, num_hidden_layers=4, num_key_value_heads=1)


def config_of(strategy: dict[str, Any] | None = None, schedule: str = "1f1b", **degrees: int) -> MeshCommandConfig:
    return MeshCommandConfig(
        model=SMALL,
        mesh=MeshConfig(**{f"{name}_size": size for name, size in degrees.items()}),
        strategy=StrategyConfig(**(strategy or {})),
        pipeline=PipelineConfig(pp_schedule=schedule),
        batch=BatchConfig(seq_len=15, micro_batch_size=2),
    )


def drawn(config: MeshCommandConfig, width: int = 80) -> list[str]:
    return draw(config, holdings_of(config), groups_in_order(config.mesh), width).splitlines()


def test_a_small_mesh_as_it_is_drawn() -> None:
    lines = drawn(config_of({"zero": 1, "vocab_parallel": True, "sequence_parallel": True}, dp=2, pp=2, tp=2))
    begin = lines.index("Ranks are numbered along tp first, then cp, pp, dp:")
    assert lines[begin + 1 : begin + 15] == [
        "           | tp 0  tp 1",
        "-----------------------",
        "dp 0  pp 0 |    0     1",
        "dp 0  pp 1 |    2     3",
        "dp 1  pp 0 |    4     5",
        "dp 1  pp 1 |    6     7",
        "",
        "dp 0: samples 0-1",
        "dp 1: samples 2-3",
        "pp 0: model embedding, blocks 0-1",
        "pp 1: model blocks 2-3, final norm, tied head",
        "tp 0: positions outside of attention and feed-forward 0-7; heads 0-3; ffn",
        "  columns 0-127; vocab rows 0-30",
        "tp 1: positions outside of attention and feed-forward 8-14; heads 4-7; ffn",
    ]
    assert "Ranks 0 and 4 hold the same parameters and gradients; so do 1 and 5; so do 2 and" in lines
    assert lines[-3:] == [
        "dp: (0, 4) (1, 5) (2, 6) (3, 7)",
        "pp: (0, 2) (1, 3) (4, 6) (5, 7)",
        "tp: (0, 1) (2, 3) (4, 5) (6, 7)",
    ]


MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp 8": {"tp": 8},
    "pp 4": {"pp": 4},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
    "cp 4 x tp 2": {"cp": 4, "tp": 2, "strategy": {"sequence_parallel": True}},
    "dp 40": {"dp": 40, "strategy": {"zero": 3}},
    "cp 16 x tp 8": {"cp": 16, "tp": 8, "strategy": {"zero": 2}},
    "dp 8 x pp 4 x cp 4 x tp 8": {"dp": 8, "pp": 4, "cp": 4, "tp": 8, "strategy": {"zero": 3, "vocab_parallel": True}},
}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("row", MESHES.values(), ids=MESHES.keys())
def test_a_drawing_is_as_wide_as_the_terminal_and_as_long_as_eyes_bear(row: dict[str, Any], width: int) -> None:
    lines = drawn(config_of(**row), width)
    table = next((i for i, line in enumerate(lines) if line.startswith("ranks ")), 0)
    wrapped = [line for i, line in enumerate(lines) if not table <= i <= table + 20]
    assert max(map(len, wrapped)) <= width
    assert max(map(len, lines)) <= max(width, 110)
    assert len(lines) < 160


@pytest.mark.parametrize(
    "row", [row for name, row in MESHES.items() if "16" not in name and "40" not in name and "8 x" not in name], ids=str
)
def test_every_rank_is_in_the_grid_once_and_in_its_order(row: dict[str, Any]) -> None:
    config = config_of(**row)
    rows = [line.partition("|")[2] for line in drawn(config, 200) if re.match(r"dp \d+  pp \d+ +\|", line)]
    assert [int(number) for line in rows for number in line.split()] == list(range(config.mesh.world_size))


def test_a_wide_mesh_says_what_it_leaves_out() -> None:
    text = "\n".join(drawn(config_of(**MESHES["dp 8 x pp 4 x cp 4 x tp 8"])))
    assert "1023" in text
    assert text.count("...") > 10
    assert re.search(r"dp: .* \d+\s+in\s+all", text, re.DOTALL)


def test_what_a_coordinate_decides_alone() -> None:
    config = config_of({"sequence_parallel": True}, dp=2, pp=2, cp=2, tp=2)
    found = {axis: decided(holdings_of(config), axis) for axis in ("dp", "pp", "cp", "tp")}
    assert [facts for _, facts in found["dp"]] == [{"samples": "0-1"}, {"samples": "2-3"}]
    assert [list(facts) for _, facts in found["pp"]] == [["model"]] * 2
    # Under SP a position outside of attention is decided by cp and tp together, so by neither alone.
    assert [facts for _, facts in found["cp"]] == [{"positions": "0-3, 12-14"}, {"positions": "4-11"}]
    assert [facts for _, facts in found["tp"]] == [
        {"heads": f"{i * 4}-{i * 4 + 3}", "ffn columns": f"{i * 128}-{i * 128 + 127}"} for i in (0, 1)
    ]


def test_one_rank_in_full() -> None:
    config = config_of({"zero": 3, "vocab_parallel": True}, dp=2, tp=2)
    text = draw_rank(config, holdings_of(config)[3], 80)
    assert "Rank 3: dp 1, pp 0, cp 0, tp 1" in text
    assert "  dp group: ranks 1 and 3" in text
    assert text.count(" group: ") == 2
    assert "model.embed_tokens.weight: 31-60 of 61 x 64\n  keeps weight 47-60 of 61 x 64;" in text
    assert "parameters" in text
    assert "of padding" in text


class Balanced(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "hr", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_command_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.html"
    result = command.run(config_of(dp=2, tp=2).model_copy(update={"html": path, "rank": 3}))
    said = capsys.readouterr().out
    assert "Rank 3: dp 1, pp 0, cp 0, tp 1" in said
    assert f"wrote {path}" in said
    assert (len(result.holdings), result.files, result.exit_code) == (4, (path,), 0)
    parser = Balanced()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.open == []
    assert len(command.run(config_of(dp=2, tp=2).model_copy(update={"rank": 3})).holdings) == 1


@pytest.mark.parametrize(
    ("values", "what", "fix"),
    [
        ({"mesh": MeshConfig(tp_size=3)}, "num_attention_heads=8 cannot be cut over tp=3", "use --tp-size 2 or 1"),
        ({"mesh": MeshConfig(tp_size=2), "rank": 2}, "rank=2 was given, but the mesh has ranks 0 to 1", "change --rank"),
        ({"rank": -1}, "rank=-1 was given, at least 0 is wanted", "change --rank"),
        (
            {"html": Path("/nowhere/mesh.html")},
            "html=/nowhere/mesh.html: the folder /nowhere is not there",
            "make it, or change --html",
        ),
        (
            {"mesh": MeshConfig(dp_size=2), "batch": BatchConfig(micro_batch_size=2, global_batch_size=2)},
            "global_batch_size=2 cannot be shared out over dp=2 in microbatches of 2",
            "use --global-batch-size 4, or --micro-batch-size 1",
        ),
        (
            {"mesh": MeshConfig(dp_size=2048)},
            "2048 ranks were asked for, and no eye can follow more than 1024",
            "lower --dp-size: along it, ranks differ in their samples and in shards by ZeRO only",
        ),
    ],
)
def test_refusals(values: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(TronError) as error:
        MeshCommandConfig(**values)
    assert (error.value.what, error.value.fix) == (what, fix)


def test_a_batch_that_is_not_given_is_a_microbatch_on_every_rank_of_dp() -> None:
    assert [holding.samples for holding in holdings_of(config_of(dp=3))] == [((0, 2),), ((2, 4),), ((4, 6),)]


def test_a_refusal_needs_no_torch() -> None:
    code = (
        "import sys\nfrom minimind_tron.cli import run\nfrom minimind_tron.errors import TronError\n"
        "try:\n    run(['mesh', '--tp', '3'])\nexcept TronError as error:\n    print(error.fix, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "use --tp-size 2 or 1 False\n"


# Held against real ranks


def made_for_real(config: MeshCommandConfig) -> tuple[list[tuple[int, ...]], Mesh, dict[str, tuple[Any, int]]]:
    """The groups that a rank really makes, its mesh, and its parameters: their regions, and the elements of their masters."""
    made: list[tuple[int, ...]] = []
    right = dist.new_group

    def record(ranks: list[int], **others: Any) -> Any:
        made.append(tuple(ranks))
        return right(ranks, **others)

    with mock.patch.object(dist, "new_group", record):
        mesh = build_mesh(config.mesh, dist.get_rank(), dist.get_world_size())
    model = build_model(config, mesh, torch.device("cpu"))
    kept = {}
    for name, each in model.masters.kept.items():
        region = tuple((part.start, part.stop) for part in layout_of(each.weight).region)
        kept[name] = (region, each.master.shape.numel())
    # Groups are compared by what they are, and do not travel.
    return (
        made,
        dataclasses.replace(mesh, **{axis: dataclasses.replace(getattr(mesh, axis), group=None, sharers={}) for axis in ALL}),
        kept,
    )


ALL = ("dp", "pp", "cp", "tp", "data", "ends")
REAL: dict[str, dict[str, Any]] = {
    "tp 4": {"tp": 4},
    "dp 2 x tp 2": {"dp": 2, "tp": 2, "strategy": {"zero": 3, "vocab_parallel": True, "sequence_parallel": True}},
    "dp 2 x pp 2": {"dp": 2, "pp": 2, "strategy": {"zero": 1}},
    "dp 2 x cp 2": {"dp": 2, "cp": 2, "strategy": {"zero": 2}},
    "pp 4": {"pp": 4},
}


@pytest.mark.parametrize("row", REAL.values(), ids=REAL.keys())
def test_what_is_drawn_is_what_ranks_make_and_hold(pool: Pools, row: dict[str, Any]) -> None:
    config = config_of(**row)
    groups, expected = groups_in_order(config.mesh), holdings_of(config)
    for rank, (made, mesh, kept) in enumerate(pool(config.mesh.world_size).run(made_for_real, config)):
        assert made == [line for _, line in groups], "every group, in this order"
        assert mesh == view_mesh(config.mesh, rank)
        parts = {part.name: part for part in expected[rank].parts}
        assert parts.keys() == kept.keys()
        assert all(parts[name].local == region for name, (region, _) in kept.items())
        states = expected[rank].states
        assert states.elements + states.padding == 2 * sum(numbers for _, numbers in kept.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_element_is_held_as_often_as_there_are_copies(zero: int) -> None:
    config = config_of({"zero": zero, "vocab_parallel": True}, dp=2, cp=2, tp=2)
    whole = {name: weight.numel() for name, weight in build_model(config_of(), Mesh(), torch.device("meta")).named_parameters()}
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("local", "weight", "gradient", "state")}
    for holding in holdings_of(config):
        for part in holding.parts:
            for kind, count in counts.items():
                count[part.name] += math.prod(end - begin for begin, end in getattr(part, kind))
    cut = {"weight": zero == 3, "gradient": zero >= 2, "state": zero >= 1}
    for name, numbers in whole.items():
        copies = counts["local"][name] // numbers
        assert copies in (4, 8)
        assert counts["local"][name] == copies * numbers
        for kind, is_cut in cut.items():
            assert counts[kind][name] == copies * numbers // (4 if is_cut else 1), f"{kind} of {name}"
    assert sorted({holding.samples for holding in holdings_of(config)}) == [((0, 2),), ((2, 4),)]


def test_the_page_has_every_rank_and_group_and_fetches_nothing() -> None:
    config = config_of({"zero": 3}, dp=2, pp=2, tp=2)
    text = page(config, holdings_of(config), [*groups_in_order(config.mesh), ("<script>", (0, 1))])
    assert all(f"<summary>rank {rank}: " in text for rank in range(8))
    assert text.count("<li>dp: ") == text.count("<li>pp: ") == text.count("<li>tp: ") == 4
    assert "<script>" not in text
    assert "&lt;script&gt;: 0, 1" in text
    assert not re.search(r"https?:|src=|@import|href=", text)
