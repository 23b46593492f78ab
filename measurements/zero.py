"""What the stages of ZeRO keep and send and what recomputation saves, over two ranks: ``make measure-zero``.

Writes docs/zero.json. For every stage, of the 64M model in float32 and in bfloat16 with float32 masters: the bytes of parameters,
gradients and optimizer states on a rank between steps, and what it sends over dp in a step. For every recomputation: the most
bytes that a microbatch's forward leaves for its backward, and the wall clock of a step.
"""

import gc
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor

from measurements.storages import Storages
from minimind_tron import runtime
from minimind_tron.collectives import gather_objects
from minimind_tron.config import BatchConfig
from minimind_tron.ledger import ledger
from minimind_tron.mesh import Mesh, build_mesh
from minimind_tron.model import Model, build_model, initialise
from minimind_tron.optim import build_adamw
from minimind_tron.parallel.zero import Masters
from minimind_tron.run_config import TrainConfig
from minimind_tron.step import compute_gradients, train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, Recompute, StrategyConfig, ZeroStage

RANKS, PASSES, ROUNDS = 2, 2, 3
# What is kept and sent between steps does not depend on it.
SHORT, LONG = 16, 256
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Kept:
    """A stage's figures of one rank."""

    zero: int
    precision: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Left:
    """What a recomputation leaves for the backward of a microbatch, and the wall clock of each round in seconds."""

    recompute: str
    left_bytes: int
    seconds: list[float]


def config_of(zero: ZeroStage, precision: Any, recompute: Recompute, seq_len: int) -> TrainConfig:
    """The 64M model; every rank has two microbatches of one sample."""
    batch = BatchConfig(seq_len=seq_len, micro_batch_size=1, global_batch_size=RANKS * PASSES)
    strategy = StrategyConfig(zero=zero, recompute=recompute)
    return TrainConfig(mesh=MeshConfig(dp_size=RANKS), strategy=strategy, batch=batch, precision=precision, device="cpu")


def batch_of(config: TrainConfig) -> Batch:
    """Random ids, each label the next one."""
    stream = torch.randint(0, config.model.vocab_size, (RANKS * PASSES, config.batch.seq_len + 1))
    return Batch(stream[:, :-1].clone(), stream[:, 1:].clone())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each once, as they are now."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def timed_steps(model: Model, optimizer: torch.optim.Optimizer, config: TrainConfig, mesh: Mesh) -> list[float]:
    """The wall clock of some steps after a first one, all ranks beginning together."""
    seconds = []
    for _ in range(1 + ROUNDS):
        gather_objects(None, mesh.dp)
        start_s = time.perf_counter()
        train_step(model, optimizer, batch_of(config), 1, config.optimizer.clip_norm)
        gather_objects(None, mesh.dp)
        seconds.append(time.perf_counter() - start_s)
    return seconds[1:]


def keep(zero: ZeroStage, precision: Any, mesh: Mesh) -> Kept:
    """A stage's figures on this rank."""
    config = config_of(zero, precision, "none", SHORT)
    model = build_model(config, mesh, torch.device("cpu"))
    initialise(model, config.seed)
    optimizer = build_adamw(model, config.optimizer)
    with ledger() as entries:
        train_step(model, optimizer, batch_of(config), 1, config.optimizer.clip_norm)
    every = model.masters.kept.values()
    return Kept(
        zero,
        precision,
        bytes_of(tensor for kept in every for tensor in (kept.weight.data, kept.master.data, kept.stored)),
        bytes_of(kept.master.grad for kept in every if kept.master.grad is not None),
        bytes_of(x for state in optimizer.state.values() for x in state.values() if x.dim()),
        sum(entry.sent_bytes for entry in entries),
    )


def leave(recompute: Recompute, mesh: Mesh) -> Left:
    """What a microbatch's forward leaves, counted when its backward begins, and a step's wall clock."""
    config = config_of(0, "full", recompute, LONG)
    model = build_model(config, mesh, torch.device("cpu"))
    initialise(model, config.seed)
    seconds = timed_steps(model, build_adamw(model, config.optimizer), config, mesh)
    found: list[int] = []
    with Storages() as storages:
        take, first = Masters.take, model.masters.segments[-1]

        def taking(self: Masters, segment: Any) -> None:
            if segment is first and not found:
                gc.collect()
                found.append(storages.held() - bytes_of(weight.grad for weight in segment.weights if weight.grad is not None))
            take(self, segment)

        with mock.patch.object(Masters, "take", taking):
            compute_gradients(model, batch_of(config), 1)
    return Left(recompute, found[0], seconds)


def main() -> None:
    """Measure on two ranks; rank 0 shows and writes its own figures."""
    with runtime.session(device="cpu") as world:
        mesh = build_mesh(MeshConfig(dp_size=RANKS), world.rank, world.size)
        kept = [keep(zero, precision, mesh) for precision, zero in product(("full", "mixed"), get_args(ZeroStage))]
        left = [leave(recompute, mesh) for recompute in get_args(Recompute)]
        if mesh.rank == 0:
            for each in kept:
                sizes = (each.parameter_bytes, each.gradient_bytes, each.state_bytes, each.sent_bytes)
                mega = " | ".join(f"{size / 1e6:.0f}" for size in sizes)
                runtime.say(f"| {each.precision} | {each.zero} | {mega} |")
            for one in left:
                runtime.say(f"| {one.recompute} | {one.left_bytes / 1e6:.1f} | {median(one.seconds):.2f} |")
            about = {"ranks": RANKS, "seq_len": LONG, "microbatches": PASSES}
            figures = {"stages": [asdict(each) for each in kept], "recompute": [asdict(one) for one in left]}
            (DOCS / "zero.json").write_text(json.dumps({**about, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    if runtime.launched():
        main()
        runtime.leave(0)
    sys.exit(runtime.launch_command([sys.executable, "-m", "measurements.zero"], RANKS))
