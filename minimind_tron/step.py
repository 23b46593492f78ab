"""One optimizer step: train, validate and benchmark all call these functions.

A step is a pipeline schedule, also on one stage: there it says in which order microbatches are accumulated.

The loss is the sum of cross entropy over all valid labels of the global batch divided by their number. That number is known
before the first backward, so that every microbatch is divided by the same one and gradients are only ever added.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minimind_tron.collectives import all_gather, sum_over
from minimind_tron.dropout import Noise
from minimind_tron.mesh import Axis
from minimind_tron.model import Finish, Model, Piece
from minimind_tron.optim import clip_gradients, global_norm
from minimind_tron.parallel import pipeline
from minimind_tron.parallel.schedules import Schedule
from minimind_tron.parallel.vocab import IGNORED, check_ids
from minimind_tron.tokens import Batch


@dataclass(frozen=True)
class StepResult:
    """What a step did: loss in nats a token, the number of valid labels, the gradient norm before clipping.

    Without a valid label in the whole global batch nothing was changed, and loss and norm are 0. Where loss or norm are not finite,
    nothing was changed either.
    """

    loss: float
    valid_tokens: int
    gradient_norm: float

    @property
    def finite(self) -> bool:
        """Whether the step had numbers for gradients; the same on every rank, since loss and norm are."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def microbatches(batch: Batch, micro_batch_size: int, model: Model) -> Iterator[Piece]:
    """A batch in microbatches on the model's device, sequence first, checked.

    Shapes: batch [G, S] -> ids and labels [S, B] each. Raises: TronError for an id or a label outside of the vocab.
    """
    check_ids(batch.ids_BS, batch.labels_BS, model.config.vocab_size)
    device = model.storage.device
    pairs = zip(batch.ids_BS.split(micro_batch_size), batch.labels_BS.split(micro_batch_size), strict=True)
    for number, (ids_BS, labels_BS) in enumerate(pairs):
        yield Piece(ids_BS.T.contiguous().to(device), labels_BS.T.contiguous().to(device), number * micro_batch_size)


def own_pieces(pieces: Sequence[Piece], dp: Axis) -> list[Piece]:
    """This rank's microbatches: a run of them, by index. Where they are no multiple of dp, ranks get more without any label.

    Every rank gets as many, since under ZeRO each takes part in every gather and sum.
    """
    each = -(-len(pieces) // dp.size)
    mine = list(pieces[dp.rank * each : (dp.rank + 1) * each])
    blank = pieces[0]._replace(labels_SB=torch.full_like(pieces[0].labels_SB, IGNORED))
    return mine + [blank] * (each - len(mine))


def count_valid(batch: Batch) -> int:
    """Labels of the global batch that count; every rank holds the whole batch, so nothing is sent."""
    return int((batch.labels_BS != IGNORED).sum())


def run_pipeline(
    model: Model,
    pieces: Sequence[Piece],
    finish: Finish,
    *,
    backward: bool,
    noise: Noise | None = None,
    timed: list[pipeline.Timed] | None = None,
) -> dict[int, Tensor]:
    """Take microbatches through the model's pipeline; on the last stage, what ``finish`` made of each, by number.

    ``finish`` takes the final hidden states [s, B, D] and the labels [S, B]; with ``backward`` its results are added up and
    differentiated. With noise, elements are dropped. Cost: see ``parallel/pipeline.py`` and ``parallel/zero.py``.
    """
    pp, storage = model.mesh.pp, model.storage
    schedule, program = pipeline.plan(model.pipeline, pp.size, len(pieces), backward)
    work = pipeline.Work(
        segments=lambda chunk: model.segments[chunk],
        view=lambda i: model.view(pieces[i], finish, noise),
        masters=model.masters,
        shape=lambda i: model.hidden_shape(pieces[i].ids_SB),
        dtype=storage.dtype,
        device=storage.device,
    )
    return pipeline.run(schedule, program, pp, work, timed)


def schedule_of(model: Model, passes: int) -> Schedule:
    """The schedule of a training step of so many microbatches."""
    return pipeline.plan(model.pipeline, model.mesh.pp.size, passes, backward=True)[0]


def _total(model: Model, losses: dict[int, Tensor]) -> float:
    """The sum of what the ranks of the last stage have, each in the order of microbatches, on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=model.storage.device)
    for _, loss in sorted(losses.items()):
        total += loss
    return float(sum_over(total, (model.mesh.data, model.mesh.pp)))


def compute_gradients(
    model: Model,
    batch: Batch,
    micro_batch_size: int,
    noise: Noise | None = None,
    timed: list[pipeline.Timed] | None = None,
) -> tuple[float, int]:
    """Set every master's gradient to that of the whole global batch, raw; returns the loss and the number of valid labels.

    Cost: one forward and backward per microbatch of this rank, with the gradient sums of ``parallel/zero.py``.
    """
    valid = count_valid(batch)
    pieces = own_pieces(list(microbatches(batch, micro_batch_size, model)), model.mesh.dp)
    model.masters.begin(len(pieces))
    if not valid:
        return 0.0, 0

    def finish(x_sBD: Tensor, labels_SB: Tensor) -> Tensor:
        return model.loss(x_sBD, labels_SB) / valid

    losses = run_pipeline(model, pieces, finish, backward=True, noise=noise, timed=timed)
    model.masters.finish()
    return _total(model, losses), valid


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch_size: int,
    clip_norm: float,
    noise: Noise | None = None,
    timed: list[pipeline.Timed] | None = None,
) -> StepResult:
    """Gradients, their true norm, clipping, and the optimizer's update, which every rank skips if the norm is not finite."""
    masters = model.masters
    loss, valid = compute_gradients(model, batch, micro_batch_size, noise, timed)
    if not valid:
        return StepResult(0.0, 0, 0.0)
    result = StepResult(loss, valid, float(global_norm(masters.parameters(), model.mesh)))
    if result.finite:
        clip_gradients(masters.parameters(), result.gradient_norm, clip_norm)
        masters.lift()
        optimizer.step()
        masters.publish()
    return result


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch], micro_batch_size: int) -> float:
    """The mean loss over the valid labels of some batches, in nats a token, the same on every rank; 0 where there is none."""
    batches = list(batches)
    pieces = [piece for batch in batches for piece in microbatches(batch, micro_batch_size, model)]
    found = run_pipeline(model, own_pieces(pieces, model.mesh.dp), model.loss, backward=False)
    return _total(model, found) / max(1, sum(map(count_valid, batches)))


@torch.no_grad()
def logits_of(model: Model, batch: Batch, micro_batch_size: int) -> Tensor:
    """The whole logits of a batch on every rank, for checks and sampling.

    Shapes: [B, S, V]. Cost: a forward pass, an all-reduce of the logits over pp and an all-gather over dp.
    """

    def finish(x_sBD: Tensor, labels_SB: Tensor) -> Tensor:
        return model.whole_logits(x_sBD, labels_SB.shape[0]).transpose(0, 1)

    dp, samples = model.mesh.dp, len(batch.ids_BS)
    # Every rank takes as many microbatches of one size, so that what they find fits together; the first samples fill the last up.
    size = min(micro_batch_size, -(-samples // dp.size))
    indices = torch.arange(samples + -samples % (size * dp.size)) % samples
    filled = Batch(batch.ids_BS[indices], batch.labels_BS[indices])
    pieces = own_pieces(list(microbatches(filled, size, model)), dp)
    found = run_pipeline(model, pieces, finish, backward=False)
    shape = (sum(piece.ids_SB.shape[1] for piece in pieces), batch.ids_BS.shape[1], model.config.vocab_size)
    mine = torch.cat([found[i] for i in sorted(found)]) if found else model.storage.zeros(shape)
    return all_gather(sum_over(mine, (model.mesh.pp,)), dp)[:samples]
