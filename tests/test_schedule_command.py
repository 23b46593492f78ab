"""The schedule command: figures that are the papers', files that hold every action and message once, mistakes in one line."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from minimind_tron.commands.schedule import ideal_bubble, run, table
from minimind_tron.errors import TronError
from minimind_tron.parallel.schedules import NAMES, Costs, build, simulate
from minimind_tron.view_config import ScheduleConfig


def result_of(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """What the command writes as JSON."""
    run(ScheduleConfig(json_file=tmp_path / "a.json", **values))
    return json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))


def test_figures_of_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(ScheduleConfig())
    assert result.exit_code == 0
    assert result.files == ()
    found = {s.schedule: (s.virtual_stages, s.makespan, s.alive, s.messages) for s in result.summaries}
    assert found == {
        "gpipe": (1, 33.0, (8, 8, 8, 8), 48),
        "1f1b": (1, 33.0, (4, 3, 2, 1), 48),
        "interleaved": (2, 28.5, (5.5, 4.5, 3.5, 2.5), 112),
        "zb-h1": (1, 27.0, (4, 4, 4, 4), 48),
        "zb-v": (2, 25.5, (4, 4, 4, 4), 96),
    }
    printed = capsys.readouterr().out
    assert printed.endswith(table(result.summaries) + "\n"), "no file was asked for, so none is mentioned"
    assert all(f"{name}   p = 4" in printed for name in NAMES)
    assert len([line for line in printed.splitlines() if line.startswith("stage ")]) == 20


COSTS = [Costs(), Costs(1, 2, 2), Costs(1, 0.5, 1.5), Costs(2, 1, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_ideal_bubbles_are_those_of_the_simulation(name: str) -> None:
    promised = 0
    for stages, microbatches, costs in product(range(1, 6), range(1, 13), COSTS):
        schedule = build(name, stages, {"interleaved": 3, "zb-v": 2}.get(name, 1), microbatches)
        if ideal := ideal_bubble(schedule, costs):
            promised += 1
            assert simulate(schedule, costs).bubble == pytest.approx(ideal[0], abs=1e-9), (
                schedule.name,
                stages,
                microbatches,
                costs,
            )
    assert promised >= 20


def test_table_shows_a_dash_where_nothing_is_promised() -> None:
    result = run(ScheduleConfig(cost_forward=3.0, num_microbatches=6))
    lines = {line.split()[0]: line for line in table(result.summaries).splitlines()}
    assert "(p-1)/(m+p-1) = 33.3%" in lines["1f1b"]
    assert all(" - " in lines[name] for name in ("interleaved", "zb-h1", "zb-v"))


def test_the_virtual_stages_are_those_of_interleaved(tmp_path: Path) -> None:
    schedules = result_of(tmp_path, virtual_stages=3, num_microbatches=4)["schedules"]
    assert {s["schedule"]: s["virtual_stages"] for s in schedules} == dict(zip(NAMES, (1, 1, 3, 1, 2), strict=True))


def test_a_schedule_named_twice_is_drawn_once() -> None:
    assert [s.schedule for s in run(ScheduleConfig(pp_schedule=("zb-v", "1f1b", "zb-v"))).summaries] == ["zb-v", "1f1b"]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 3), (4, 1), (4, 6)])
def test_json_has_every_action_and_message_once(tmp_path: Path, stages: int, microbatches: int) -> None:
    data = result_of(tmp_path, pp_size=stages, num_microbatches=microbatches, cost_message=0.5)
    assert data["config"]["pp_size"] == stages
    assert data["config"]["cost_message"] == 0.5
    for schedule in data["schedules"]:
        chunks = stages * schedule["virtual_stages"]
        kinds = "FIW" if schedule["schedule"].startswith("zb") else "FB"
        timed = [(a["kind"], a["chunk"], a["microbatch"]) for actions in schedule["actions"] for a in actions]
        steps = [step for steps in schedule["program"] for step in steps]
        computed = [tuple(step["action"].values()) for step in steps if step["do"] == "compute"]
        assert sorted(timed) == sorted(product(kinds, range(chunks), range(microbatches)))
        assert computed == timed, "stage by stage, in the same order"
        sent = [s["message"] for s in steps if s["do"] == "send"] + [s["sent"] for s in steps if s["do"] == "exchange"]
        received = [s["message"] for s in steps if s["do"] == "receive"] + [s["received"] for s in steps if s["do"] == "exchange"]
        assert len(sent) == schedule["messages"]
        assert sorted(map(str, sent)) == sorted(map(str, received))
        assert max(a["end"] for actions in schedule["actions"] for a in actions) == schedule["makespan"]


def test_json_says_what_an_action_waited_for(tmp_path: Path) -> None:
    (schedule,) = result_of(tmp_path, pp_schedule=("1f1b",), pp_size=2, num_microbatches=2)["schedules"]
    first, second, third, _ = schedule["actions"][0]
    assert first == {"kind": "F", "chunk": 0, "microbatch": 0, "start": 0.0, "end": 1.0, "waited_for": None}
    assert second["waited_for"] is None
    assert third["waited_for"] == {"kind": "B", "chunk": 1, "microbatch": 0}


def test_all_files_are_written_and_named_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.png", "a.html", "a.json")]
    result = run(ScheduleConfig(png=paths[0], html=paths[1], json_file=paths[2]))
    assert result.files == tuple(paths)
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {', '.join(map(str, paths))}"
    assert paths[0].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert paths[1].read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    actions = sum(len(stage) for s in json.loads(paths[2].read_text())["schedules"] for stage in s["actions"])
    assert paths[1].read_text(encoding="utf-8").count('<g class="bar ') == actions


@pytest.mark.parametrize(("field", "spelled"), [("png", "--png"), ("html", "--html"), ("json_file", "--json")])
def test_a_file_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path: Path, field: str, spelled: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    config = ScheduleConfig(**{field: folder / "a"})
    folder.rmdir()
    with pytest.raises(TronError) as caught:
        run(config)
    assert str(caught.value) == f"{spelled} {folder / 'a'} cannot be written (No such file or directory); change {spelled}"


def test_costs_without_a_backward_can_be_drawn(tmp_path: Path) -> None:
    config = ScheduleConfig(cost_input_gradient=0, cost_weight_gradient=0, png=tmp_path / "a.png", html=tmp_path / "a.html")
    assert run(config).summaries[0].makespan == 11.0


def test_no_torch_is_imported() -> None:
    code = "import sys, minimind_tron.commands.schedule as s; s.run(s.ScheduleConfig()); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)
