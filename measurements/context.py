"""What the ways of context parallelism do, send, keep and take, over two ranks: ``make measure-context``.

Writes docs/context.json: for every way and layout the pairs of query and key that each rank computes, the bytes it sends over cp,
the most bytes it keeps allocated, and the wall clock of a gradient pass, beside the dense model on one rank.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args
from unittest import mock

import torch

from measurements.storages import Storages
from minimind_tron import runtime
from minimind_tron.collectives import gather_objects
from minimind_tron.config import ModelConfig
from minimind_tron.ledger import ledger
from minimind_tron.mesh import Mesh, build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.parallel import attention
from minimind_tron.parallel.attention import Tile
from minimind_tron.step import compute_gradients
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, SequenceLayout, StrategyConfig

RANKS, SEQ_LEN, ROUNDS = 2, 8192, 3
# Attention is more than half of the work here.
SIZE = ModelConfig(vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
WAYS: tuple[Any, ...] = get_args(StrategyConfig.model_fields["cp_comm_type"].annotation)
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Measured:
    """A way's figures, one number a rank, and the wall clock of each round in seconds."""

    way: str
    layout: str
    pairs: list[int]
    sent_bytes: list[int]
    peak_bytes: list[int]
    seconds: list[float]


def batch() -> Batch:
    """Random ids, each label the next one."""
    stream = torch.randint(0, SIZE.vocab_size, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    return Batch(stream[:, :-1].clone(), stream[:, 1:].clone())


def count(model: Model) -> tuple[int, int, int]:
    """Pairs computed in a forward (all heads of a layer), bytes sent over cp and peak bytes of one pass over the batch."""
    pairs, add = 0, attention.Attended.add

    def counted(self: Any, block: torch.Tensor, tile: Tile) -> None:
        nonlocal pairs
        pairs += tile.pairs * self.q.shape[0] * self.q.shape[1]
        add(self, block, tile)

    with mock.patch.object(attention.Attended, "add", counted), ledger() as entries, Storages() as storages:
        compute_gradients(model, batch(), 1)
    # Gradients are summed over cp, too, by the only all-reduces there.
    in_attention = sum(entry.sent_bytes for entry in entries if entry.axis == "cp" and entry.kind != "all_reduce")
    return pairs // SIZE.num_hidden_layers, in_attention, storages.peak


def timed(model: Model, mesh: Mesh) -> float:
    """The wall clock of one pass, all ranks beginning together."""
    gather_objects(None, mesh.cp)
    start_s = time.perf_counter()
    compute_gradients(model, batch(), 1)
    gather_objects(None, mesh.cp)
    return time.perf_counter() - start_s


def build(mesh: Mesh, way: Any, layout: SequenceLayout) -> Model:
    """The model on a mesh."""
    model = Model(SIZE, mesh, StrategyConfig(cp_comm_type=way, cp_layout=layout))
    initialise(model, 42)
    return model


def measure(mesh: Mesh) -> list[Measured]:
    """Every way and layout in interleaved rounds, so a drift of the machine hits all alike; the dense model, on rank 0, too."""
    kinds = [(name, layout) for name in WAYS for layout in get_args(SequenceLayout)]
    models = {kind: build(mesh, *kind) for kind in kinds}
    dense = build(Mesh(), "ring", "contiguous") if mesh.rank == 0 else None
    found: dict[Any, list[float]] = {kind: [] for kind in kinds}
    alone: list[float] = []
    for _ in range(ROUNDS):
        if dense:
            alone.append(timed(dense, Mesh()))
        for kind, model in models.items():
            found[kind].append(timed(model, mesh))
    ours = [measured(*kind, gather_objects(count(model), mesh.cp), found[kind]) for kind, model in models.items()]
    return [measured("dense", "", [count(dense)], alone), *ours] if dense else ours


def measured(way: str, layout: str, counts: list[tuple[int, int, int]], seconds: list[float]) -> Measured:
    """The figures of a way from those of its ranks."""
    pairs, sent, peak = (list(each) for each in zip(*counts, strict=True))
    return Measured(way, layout, pairs, sent, peak, seconds)


def show(found: list[Measured]) -> None:
    """A table in Markdown."""
    runtime.say("| way | layout | pairs a rank, millions | MB sent a rank | peak MB a rank | s a step |")
    runtime.say("| --- | --- | --- | --- | --- | --- |")
    for each in found:
        mega = [", ".join(f"{n / 1e6:.0f}" for n in numbers) for numbers in (each.pairs, each.sent_bytes, each.peak_bytes)]
        runtime.say(f"| {each.way} | {each.layout} | {' | '.join(mega)} | {median(each.seconds):.2f} |")


def main() -> None:
    """Measure on two ranks; rank 0 writes."""
    with runtime.session(device="cpu") as world:
        mesh = build_mesh(MeshConfig(cp_size=RANKS), world.rank, world.size)
        found = measure(mesh)
        if mesh.rank == 0:
            show(found)
            about = {"seq_len": SEQ_LEN, "samples": 1, "model": SIZE.model_dump(), "ways": [asdict(each) for each in found]}
            (DOCS / "context.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    if runtime.launched():
        main()
        runtime.leave(0)
    sys.exit(runtime.launch_command([sys.executable, "-m", "measurements.context"], RANKS))
