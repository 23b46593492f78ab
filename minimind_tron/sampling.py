"""Greedy continuation of a text, on any mesh."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minimind_tron.collectives import sum_over
from minimind_tron.errors import TronError
from minimind_tron.model import Model, Piece
from minimind_tron.parallel.vocab import check_ids
from minimind_tron.step import run_pipeline
from minimind_tron.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 tokens at the end can be the beginning of one.
LONGEST_TAIL = 3


@torch.no_grad()
def next_logits(model: Model, ids_SB: Tensor) -> Tensor:
    """The whole logits that follow the last position, on every rank.

    Shapes: ids [S, B] -> [B, V].
    Cost: a forward pass; the head sees one position (under SP one of each rank's shard), and only that one is gathered, and
    brought to every stage.
    Raises: TronError for an id outside of the vocab, and under context parallelism.
    """
    if model.mesh.cp.size > 1:
        raise TronError(f"text cannot be generated over cp={model.mesh.cp.size}", "use --cp-size 1 to generate")
    check_ids(ids_SB, None, model.config.vocab_size)

    def finish(x_sBD: Tensor, _: Tensor) -> Tensor:
        holder, position = divmod(ids_SB.shape[0] - 1, x_sBD.shape[0])
        return model.vocab.logits(x_sBD[position : position + 1], model.head)[holder]

    found = run_pipeline(model, [Piece(ids_SB, ids_SB)], finish, backward=False)
    here = found[0] if found else model.storage.zeros((ids_SB.shape[1], model.config.vocab_size))
    return sum_over(here, (model.mesh.pp,))


def agreed(token: int, model: Model) -> int:
    """What global rank 0 chose, on every rank: hosts of different kinds may round logits differently, and ranks must not part.

    Cost: one all-reduce of one number over every axis.
    """
    mesh = model.mesh
    chosen = torch.tensor(token if mesh.rank == 0 else 0, device=model.storage.device)
    return int(sum_over(chosen, (mesh.tp, mesh.cp, mesh.pp, mesh.dp)))


def greedy(
    model: Model,
    prompt_ids: Sequence[int],
    count: int,
    *,
    context: int | None = None,
    known: int | None = None,
    stop_id: int | None = None,
) -> list[int]:
    """The most likely continuation token by token, without the prompt; every rank calls it and gets the same.

    Of equally likely tokens the lowest id wins. ``context`` is how many of the last tokens the model reads (all unless given),
    ``known`` how many ids the tokenizer has: rows beyond are never chosen. A ``stop_id`` ends the text early and is left out.

    Cost: one forward pass a token over what is read, nothing being cached.
    Raises: TronError for an id outside of the vocab, and under context parallelism. AssertionError for an empty prompt.
    """
    assert prompt_ids, "there is nothing to continue"
    ids, continuation = list(prompt_ids), list[int]()
    for _ in range(count):
        read = ids if context is None else ids[-context:]
        ids_SB = torch.tensor(read, device=model.storage.device).unsqueeze(1)
        token = agreed(int(next_logits(model, ids_SB)[0, :known].argmax()), model)
        if token == stop_id:
            break
        ids.append(token)
        continuation.append(token)
    return continuation


@dataclass(frozen=True)
class Sample:
    """A text made by a model: ``left_out`` tokens at its end were no whole character, ``broken`` places inside are not UTF-8.

    The former is where the length ran out; the latter, shown as U+FFFD, is the model's mistake.
    """

    text: str
    broken: int
    left_out: int


def readable(ids: Sequence[int], tokenizer: Tokenizer) -> Sample:
    """The text of ids, up to its last whole character."""
    texts = [tokenizer.decode(ids[: len(ids) - tail]) for tail in range(min(LONGEST_TAIL, len(ids)) + 1)]
    left_out = next((tail for tail, text in enumerate(texts) if not text.endswith(REPLACEMENT)), 0)
    return Sample(texts[left_out], texts[left_out].count(REPLACEMENT), left_out)
