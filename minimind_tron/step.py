"""One optimizer step: train, validate and benchmark all call these functions.

The loss is the sum of cross entropy over all valid labels of the global batch divided by their number. That number is known
before the first backward, so that every microbatch is divided by the same one and gradients are only ever added.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minimind_tron.model import Model
from minimind_tron.optim import clip_gradients, global_norm
from minimind_tron.parallel.data import sum_gradients
from minimind_tron.parallel.vocab import IGNORED, check_ids
from minimind_tron.tokens import Batch


@dataclass(frozen=True)
class StepResult:
    """What a step did: loss in nats a token, the number of valid labels, the gradient norm before clipping.

    Without a valid label in the whole global batch nothing was changed, and loss and norm are 0.
    """

    loss: float
    valid_tokens: int
    gradient_norm: float


def microbatches(batch: Batch, micro_batch_size: int, model: Model) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch in microbatches on the model's device, sequence first, checked.

    Shapes: batch [G, S] -> ids and labels [S, B] each. Raises: TronError for an id or a label outside of the vocab.
    """
    check_ids(batch.ids_BS, batch.labels_BS, model.config.vocab_size)
    device = model.storage.device
    for ids_BS, labels_BS in zip(batch.ids_BS.split(micro_batch_size), batch.labels_BS.split(micro_batch_size), strict=True):
        yield ids_BS.T.contiguous().to(device), labels_BS.T.contiguous().to(device)


def count_valid(batch: Batch) -> int:
    """Labels of the global batch that count; every rank holds the whole batch, so nothing is sent."""
    return int((batch.labels_BS != IGNORED).sum())


def compute_gradients(model: Model, batch: Batch, micro_batch_size: int) -> tuple[float, int]:
    """Set every gradient to that of the whole global batch, raw; returns the loss and the number of valid labels.

    Cost: one forward and backward per microbatch, then the gradient sums of ``data.sum_gradients``.
    """
    model.zero_grad(set_to_none=True)
    valid = count_valid(batch)
    if not valid:
        return 0.0, 0
    loss = torch.zeros((), dtype=torch.float64, device=model.storage.device)
    for ids_SB, labels_SB in microbatches(batch, micro_batch_size, model):
        share = model(ids_SB, labels_SB) / valid
        share.backward()
        loss += share.detach()
    sum_gradients(model.parameters())
    return float(loss), valid


def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, micro_batch_size: int, clip_norm: float) -> StepResult:
    """Gradients, their true norm, clipping, and the optimizer's update."""
    loss, valid = compute_gradients(model, batch, micro_batch_size)
    if not valid:
        return StepResult(0.0, 0, 0.0)
    norm = global_norm(model.parameters(), model.mesh)
    clip_gradients(model.parameters(), norm, clip_norm)
    optimizer.step()
    return StepResult(loss, valid, float(norm))


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch], micro_batch_size: int) -> float:
    """The mean loss over the valid labels of some batches, in nats a token; 0 where there is none."""
    loss, valid = 0.0, 0
    for batch in batches:
        valid += count_valid(batch)
        for ids_SB, labels_SB in microbatches(batch, micro_batch_size, model):
            loss += float(model(ids_SB, labels_SB))
    return loss / max(1, valid)
