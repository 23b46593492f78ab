"""The mesh of a pool's worker, made once per process since it makes process groups, and small things to run on it."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimind_tron.config import ModelConfig
from minimind_tron.mesh import Axis, Mesh, build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, StrategyConfig

SIZES = (1, 2, 4)
STRATEGIES = {
    "tp": StrategyConfig(),
    "tp-async": StrategyConfig(async_communication=True),
    "sp": StrategyConfig(sequence_parallel=True, sp_recompute=False),
    "sp-async": StrategyConfig(sequence_parallel=True, sp_recompute=False, async_communication=True),
    "sp-recompute": StrategyConfig(sequence_parallel=True),
    "sp-recompute-async": StrategyConfig(sequence_parallel=True, async_communication=True),
}


@lru_cache
def mesh_of(degrees: MeshConfig) -> Mesh:
    """This worker's mesh of some degrees; without a process group the mesh of size 1."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return build_mesh(degrees, rank, size)


def tp_mesh() -> Mesh:
    """All ranks of this worker's pool along tp."""
    return mesh_of(MeshConfig(tp_size=dist.get_world_size() if dist.is_initialized() else 1))


def lonely(size: int, rank: int) -> Axis:
    """One rank's view of an axis that nobody talks over."""
    return Axis("tp", size, rank, tuple(range(size)))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank that asks with the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tiny(**changes: object) -> ModelConfig:
    """A model small enough for a test, with kv heads fewer than 4 ranks and a vocab that neither 2 nor 4 divides."""
    sizes: dict[str, object] = {
        "vocab_size": 37,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    return ModelConfig(**{**sizes, **changes})


def make_model(
    config: ModelConfig, strategy: StrategyConfig | None = None, dtype: torch.dtype = torch.float64, mesh: Mesh | None = None
) -> Model:
    """A model on this worker's mesh, its norms and biases spread so that they matter."""
    model = Model(config, mesh or tp_mesh(), strategy, dtype=dtype)
    initialise(model, seed=7, spread=0.1)
    return model


def sum_by_hand(model: Model, gradient: Callable[[str, nn.Parameter], Tensor | None]) -> None:
    """Let the masters sum gradients that no backward has made: those of one microbatch; None where a weight had no work."""
    names, given = {id(weight): name for name, weight in model.named_parameters()}, set()
    model.masters.begin(1)
    for segments in reversed(model.segments.values()):
        for segment in reversed(segments):
            for weight in segment.weights:
                weight.grad = None if id(weight) in given else gradient(names[id(weight)], weight)
                given.add(id(weight))
            model.masters.take(segment)
    model.masters.finish()


def random_batch(samples: int, seq_len: int, vocab_size: int, seed: int = 0) -> Batch:
    """Random ids, each label the next id, the last one ignored."""
    ids_BS = torch.randint(vocab_size, (samples, seq_len), generator=torch.Generator().manual_seed(seed))
    labels_BS = torch.cat((ids_BS[:, 1:], torch.full((samples, 1), -100)), 1)
    return Batch(ids_BS, labels_BS)
