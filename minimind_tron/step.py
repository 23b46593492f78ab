"""One optimizer step: train, validate and benchmark all call these functions.

A step is a pipeline schedule, also on one stage: there it says in which order microbatches are accumulated.

The loss is the sum of cross entropy over all valid labels of the global batch divided by their number. That number is known
before the first backward, so that every microbatch is divided by the same one and gradients are only ever added.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minimind_tron.collectives import sum_over
from minimind_tron.model import Model
from minimind_tron.optim import clip_gradients, global_norm
from minimind_tron.parallel import pipeline
from minimind_tron.parallel.data import sum_gradients
from minimind_tron.parallel.schedules import Schedule
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


Piece = tuple[Tensor, Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]


def run_pipeline(
    model: Model, pieces: Sequence[Piece], finish: Finish, *, backward: bool, timed: list[pipeline.Timed] | None = None
) -> dict[int, Tensor]:
    """Take microbatches through the model's pipeline; on the last stage, what ``finish`` made of each, by number.

    ``finish`` takes the final hidden states [s, B, D] and the labels [S, B]; with ``backward`` its results are added up and
    differentiated. Cost: see ``parallel/pipeline.py``.
    """

    def forward(chunk: int, x_sBD: Tensor | None, microbatch: int) -> Tensor:
        ids_SB, labels_SB = pieces[microbatch]
        x_sBD = model.run_chunk(chunk, x_sBD, ids_SB)
        return finish(x_sBD, labels_SB) if model.chunks[chunk].last else x_sBD

    pp, storage = model.mesh.pp, model.storage
    schedule, program = pipeline.plan(model.pipeline, pp.size, len(pieces), backward)
    work = pipeline.Work(forward, lambda i: model.hidden_shape(pieces[i][0]), storage.dtype, storage.device)
    return pipeline.run(schedule, program, pp, work, timed)


def schedule_of(model: Model, passes: int) -> Schedule:
    """The schedule of a training step of so many microbatches."""
    return pipeline.plan(model.pipeline, model.mesh.pp.size, passes, backward=True)[0]


def _total(model: Model, losses: dict[int, Tensor]) -> float:
    """The sum of what the ranks of the last stage have, each in the order of microbatches, on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=model.storage.device)
    for _, loss in sorted(losses.items()):
        total += loss
    return float(sum_over(total, (model.mesh.cp, model.mesh.pp)))


def compute_gradients(
    model: Model, batch: Batch, micro_batch_size: int, timed: list[pipeline.Timed] | None = None
) -> tuple[float, int]:
    """Set every gradient to that of the whole global batch, raw; returns the loss and the number of valid labels.

    Cost: one forward and backward per microbatch, then the gradient sums of ``data.sum_gradients``.
    """
    model.zero_grad(set_to_none=True)
    valid = count_valid(batch)
    if not valid:
        return 0.0, 0

    def finish(x_sBD: Tensor, labels_SB: Tensor) -> Tensor:
        return model.loss(x_sBD, labels_SB) / valid

    pieces = list(microbatches(batch, micro_batch_size, model))
    losses = run_pipeline(model, pieces, finish, backward=True, timed=timed)
    sum_gradients(model.parameters())
    return _total(model, losses), valid


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch_size: int,
    clip_norm: float,
    timed: list[pipeline.Timed] | None = None,
) -> StepResult:
    """Gradients, their true norm, clipping, and the optimizer's update."""
    loss, valid = compute_gradients(model, batch, micro_batch_size, timed)
    if not valid:
        return StepResult(0.0, 0, 0.0)
    norm = global_norm(model.parameters(), model.mesh)
    clip_gradients(model.parameters(), norm, clip_norm)
    optimizer.step()
    return StepResult(loss, valid, float(norm))


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch], micro_batch_size: int) -> float:
    """The mean loss over the valid labels of some batches, in nats a token, the same on every rank; 0 where there is none."""
    batches = list(batches)
    pieces = [piece for batch in batches for piece in microbatches(batch, micro_batch_size, model)]
    return _total(model, run_pipeline(model, pieces, model.loss, backward=False)) / max(1, sum(map(count_valid, batches)))


@torch.no_grad()
def logits_of(model: Model, batch: Batch, micro_batch_size: int) -> Tensor:
    """The whole logits of a batch on every rank, for checks and sampling.

    Shapes: [B, S, V]. Cost: a forward pass, and an all-reduce of the logits over pp.
    """

    def finish(x_sBD: Tensor, labels_SB: Tensor) -> Tensor:
        return model.whole_logits(x_sBD, labels_SB.shape[0]).transpose(0, 1)

    found = run_pipeline(model, list(microbatches(batch, micro_batch_size, model)), finish, backward=False)
    shape = (*batch.ids_BS.shape, model.config.vocab_size)
    whole = torch.cat([found[i] for i in sorted(found)]) if found else model.storage.zeros(shape)
    return sum_over(whole, (model.mesh.pp,))
