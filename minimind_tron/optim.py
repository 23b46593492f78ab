"""AdamW, its learning-rate schedule, and the true global norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minimind_tron.collectives import sum_over
from minimind_tron.config import OptimizerConfig
from minimind_tron.layout import Layout, layout_of
from minimind_tron.mesh import Mesh
from minimind_tron.model import Model


def decays(layout: Layout) -> bool:
    """Weight decay acts on matrices only, decided on the whole tensor."""
    return len(layout.shape) >= 2


def build_adamw(model: Model, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW over a model's masters, so both moments are in their dtype; tied weights are one parameter.

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    weights = model.masters.parameters()
    groups = [
        {"params": [w for w in weights if decays(layout_of(w))], "weight_decay": config.weight_decay},
        {"params": [w for w in weights if not decays(layout_of(w))], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps)


def learning_rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of a step (the first is 0) out of ``steps``: linear warm-up, then half a cosine down to the floor.

    Source: Loshchilov and Hutter, arXiv 1608.03983, without restarts.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.floor + (config.learning_rate - config.floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def counts_here(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank is the one whose copy of a tensor counts, among the ranks that hold the same piece.

    Those are ranks of tp, the ranks of dp and cp unless ZeRO cuts the tensor, and the other end of the pipeline where both hold a
    tied matrix.
    """
    sharers = layout.cut.axis.sharing(layout.cut.parts) if layout.cut else mesh.tp
    return sharers.rank == 0 and all(axis.rank == 0 for axis in layout.partial)


@torch.no_grad()
def global_norm(weights: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The L2 norm of the whole gradient: every logical element once, whatever is replicated, tied, padded or missing.

    Where any rank has a gradient that is infinite or not a number, be it a copy that does not count, no rank gets a number.
    Shapes: float64 scalar, bit-equal on every rank. Cost: one all-reduce of one number over each of tp, dp x cp and pp.
    """
    weights = list(weights)
    square = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    for weight in weights:
        layout = layout_of(weight)
        if weight.grad is not None:
            # Zero times a number is 0, and times infinity not a number: a copy counts as nothing, unless it is no number.
            square += layout.unpadded(weight.grad).double().square().sum() * counts_here(layout, mesh)
    return sum_over(square, (mesh.tp, mesh.data, mesh.pp)).sqrt()


@torch.no_grad()
def clip_gradients(weights: Iterable[nn.Parameter], norm: Tensor | float, clip_norm: float) -> None:
    """Scale all gradients so that their global norm is at most ``clip_norm``; 0 leaves them alone."""
    if clip_norm and norm > clip_norm:
        scale = clip_norm / float(norm)
        for weight in weights:
            if weight.grad is not None:
                weight.grad.mul_(scale)
