"""What pipeline schedules keep and wait for, measured on two stages of MiniMind's 64M model: ``make measure-pipeline``.

Writes docs/pipeline-memory.png (peak memory over the number of microbatches) and docs/pipeline.json: for every schedule the live
activations as counted and as simulated, and the bubble on the wall clock, replayed and simulated.
"""

import json
import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from measurements.storages import Storages
from minimind_tron import runtime
from minimind_tron.collectives import gather_objects
from minimind_tron.config import ModelConfig
from minimind_tron.mesh import Mesh, build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.parallel.pipeline import Timed, _Stage, plan
from minimind_tron.parallel.schedules import NAMES, Action, Costs, simulate
from minimind_tron.step import compute_gradients
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig
from minimind_tron.trace import analyse, collect, recording

STAGES, SEQ_LEN, SIZE = 2, 128, ModelConfig()
MICROBATCHES = (1, 2, 4, 8, 16)
DOCS = Path(__file__).parents[1] / "docs"
TRACED = 8


@dataclass
class Graphs:
    """Which microbatches' tensors autograd still keeps, seen from the tensors themselves."""

    doing: tuple[int, int] = (-1, -1)
    kept: Counter[tuple[int, int]] = field(default_factory=Counter)
    most: int = 0

    class Kept:
        """What autograd is given in place of a tensor; it goes when autograd lets go."""

        def __init__(self, tensor: Tensor, piece: tuple[int, int], kept: Counter[tuple[int, int]]) -> None:
            self.tensor = tensor
            kept[piece] += 1
            weakref.finalize(self, kept.subtract, [piece])

    @contextmanager
    def watched(self) -> Any:
        """Count in every forward that runs inside, and look after every action."""
        act = _Stage.act

        def watched(stage: Any, action: Action) -> None:
            self.doing = action.chunk, action.microbatch
            act(stage, action)
            self.most = max(self.most, len({p for p, n in self.kept.items() if n > 0} | set(stage.put_off)))

        hooks = saved_tensors_hooks(lambda x: self.Kept(x, self.doing, self.kept), lambda kept: kept.tensor)
        with mock.patch.object(_Stage, "act", watched), hooks:
            yield


def batch_of(samples: int) -> Batch:
    """Random ids, each label the next one."""
    stream = torch.randint(0, SIZE.vocab_size, (samples, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    return Batch(stream[:, :-1].clone(), stream[:, 1:].clone())


def build(name: Any, mesh: Mesh) -> Model:
    """The model on its stage."""
    model = Model(SIZE, mesh, pipeline=PipelineConfig(pp_schedule=name))
    initialise(model, 42)
    return model


def measure_peak(name: str, mesh: Mesh, microbatches: int) -> int:
    """The most bytes that a step keeps allocated on this stage: activations, gradients, messages, temporaries."""
    model = build(name, mesh)
    with Storages() as storages:
        compute_gradients(model, batch_of(microbatches), 1)
    return storages.peak


def measure_alive(name: str, mesh: Mesh, microbatches: int) -> tuple[int, int]:
    """The most activations alive on this stage, counted and simulated."""
    graphs, model = Graphs(), build(name, mesh)
    with graphs.watched():
        compute_gradients(model, batch_of(microbatches), 1)
    schedule, _ = plan(model.pipeline, mesh.pp.size, microbatches, backward=True)
    return graphs.most, simulate(schedule, Costs()).most_alive(mesh.pp.rank)


def measure_bubbles(name: str, mesh: Mesh, microbatches: int) -> dict[str, float]:
    """The bubbles of a step after one that warms up."""
    model, batch = build(name, mesh), batch_of(microbatches)
    compute_gradients(model, batch, 1)
    with recording() as recorded:
        timed: list[Timed] = recorded.timed
        compute_gradients(model, batch, 1, timed=timed)
    schedule, _ = plan(model.pipeline, mesh.pp.size, microbatches, backward=True)
    return asdict(analyse(collect(recorded, mesh), schedule).bubbles)


def draw(peaks: dict[str, dict[int, list[int]]], path: Path) -> None:
    """Peak memory of the first stage over the number of microbatches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    looks = {"gpipe": ("black", "o", "-"), "1f1b": ("#c0392b", "s", "--")}
    for name, (color, marker, line) in looks.items():
        counts = sorted(peaks[name])
        for stage, alpha in ((0, 1.0), (1, 0.45)):
            mib = [peaks[name][m][stage] / 2**20 for m in counts]
            axes.plot(counts, mib, color=color, marker=marker, linestyle=line, alpha=alpha, label=f"{name}, stage {stage}")
    axes.set_xlabel("microbatches in a step")
    axes.set_ylabel("peak memory of a step, gradients included,\nweights not (MiB)")
    axes.set_ylim(bottom=0)
    axes.set_xticks(MICROBATCHES)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    """Measure on two ranks; rank 0 writes."""
    with runtime.session(device="cpu") as world:
        mesh = build_mesh(MeshConfig(pp_size=STAGES), world.rank, world.size)
        peaks: dict[str, dict[int, list[int]]] = {}
        for name in ("gpipe", "1f1b"):
            peaks[name] = {m: gather_objects(measure_peak(name, mesh, m), mesh.pp) for m in MICROBATCHES}
            runtime.say(name, {m: [f"{p / 2**20:.0f} MiB" for p in both] for m, both in peaks[name].items()})
        found: dict[str, Any] = {}
        for name in NAMES:
            alive = gather_objects(measure_alive(name, mesh, TRACED), mesh.pp)
            found[name] = {"alive": [counted for counted, _ in alive], "simulated alive": [said for _, said in alive]}
            found[name] |= measure_bubbles(name, mesh, TRACED)
            runtime.say(name, found[name])
        if mesh.rank == 0:
            draw(peaks, DOCS / "pipeline-memory.png")
            size = {"stages": STAGES, "seq_len": SEQ_LEN, "micro_batch_size": 1, "microbatches": TRACED}
            (DOCS / "pipeline.json").write_text(json.dumps({**size, "peak_bytes": peaks, "schedules": found}, indent=1) + "\n")


if __name__ == "__main__":
    if runtime.launched():
        main()
        runtime.leave(0)
    sys.exit(runtime.launch_command([sys.executable, "-m", "measurements.pipeline"], STAGES))
