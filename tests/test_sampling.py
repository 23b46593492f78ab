"""Greedy samples: what a full recomputation gives, the same on every rank and every mesh, and read back as text."""

import pytest
import torch
import torch.distributed as dist

from minimind_tron import sampling
from minimind_tron.config import ModelConfig
from minimind_tron.errors import TronError
from minimind_tron.mesh import build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.sampling import greedy, next_logits, readable
from minimind_tron.tokenizer import Tokenizer
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.pool import pool

# Untied: a large embedding that is the head too would say every token again.
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    tie_word_embeddings=False,
)
STRATEGIES = {
    "tp": StrategyConfig(),
    "tp+sp": StrategyConfig(sequence_parallel=True),
    "tp+vp": StrategyConfig(vocab_parallel=True),
    "tp+sp+vp": StrategyConfig(sequence_parallel=True, vocab_parallel=True, async_communication=True),
}
PROMPT = [5, 17, 3, 60, 8]


def build(strategy: StrategyConfig, scale: float = 30.0) -> Model:
    """A model whose weights are large enough for its continuations to vary."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    model = Model(CONFIG, build_mesh(MeshConfig(tp_size=size), rank, size), strategy, dtype=torch.float64)
    initialise(model, 7, spread=0.1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale if weight.ndim > 1 else 1.0)
    return model


def recomputed(count: int, context: int | None = None) -> list[int]:
    """By the whole logits of one process, every position computed again for every token."""
    model, ids = build(StrategyConfig()), list(PROMPT)
    for _ in range(count):
        read = ids[-context:] if context else ids
        row = model.logits(torch.tensor(read)[:, None])[-1, 0].tolist()
        ids.append(row.index(max(row)))
    return ids[len(PROMPT) :]


def continuation(strategy: StrategyConfig, count: int, context: int | None = None) -> list[int]:
    return greedy(build(strategy), PROMPT, count, context=context)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_greedy_is_a_full_recomputation_on_every_rank(size: int, strategy: StrategyConfig) -> None:
    wanted = recomputed(12)
    assert len(set(wanted)) > 4, "a constant continuation would hide mistakes of position"
    assert pool(size).run(continuation, strategy, 12) == [wanted] * size


@pytest.mark.parametrize("size", [1, 2])
def test_greedy_reads_no_further_back_than_the_context(size: int) -> None:
    wanted = recomputed(12, context=4)
    assert wanted != recomputed(12)
    assert pool(size).run(continuation, STRATEGIES["tp+sp+vp"], 12, 4) == [wanted] * size


def logits_apart(strategy: StrategyConfig) -> float:
    model = build(strategy)
    worst = 0.0
    for length in range(1, 10):
        ids_SB = torch.arange(2 * length).view(length, 2) * 11 % 61
        whole = model.logits(ids_SB)[-1]
        worst = max(worst, float((next_logits(model, ids_SB) - whole).norm() / whole.norm()))
    return worst


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_next_logits_are_the_last_of_all_logits_at_every_length(size: int, strategy: StrategyConfig) -> None:
    assert max(pool(size).run(logits_apart, strategy)) < 1e-12


def all_alike() -> list[int]:
    return greedy(build(STRATEGIES["tp+vp"], scale=0.0), PROMPT, 3)


@pytest.mark.parametrize("size", [1, 2])
def test_of_equal_logits_the_lowest_id_wins(size: int) -> None:
    assert pool(size).run(all_alike) == [[0, 0, 0]] * size


def after_a_rank_went_astray(agree: bool) -> list[int]:
    """Rank 1 holds other final norms: without agreement its logits, and so its tokens, are its own."""
    model = build(StrategyConfig())
    if dist.is_initialized() and dist.get_rank() == 1:
        with torch.no_grad():
            model.model.norm.weight.neg_()
    if agree:
        return greedy(model, PROMPT, 6)
    ids_SB = torch.tensor(PROMPT)[:, None]
    return [int(next_logits(model, ids_SB).argmax())]


def test_ranks_cannot_part() -> None:
    apart = pool(2).run(after_a_rank_went_astray, False)
    assert apart[0] != apart[1]
    together = pool(2).run(after_a_rank_went_astray, True)
    assert together[0] == together[1]
    assert together[0][0] == apart[0][0], "rank 0 decides"


def test_rows_that_no_token_has_are_never_chosen() -> None:
    free = continuation(StrategyConfig(), 12)
    known = max(free)
    held = greedy(build(StrategyConfig()), PROMPT, 12, known=known)
    assert max(held) < known
    assert held != free


def test_a_stop_id_ends_the_text_and_is_left_out() -> None:
    free = recomputed(12)
    stop = next(token for i, token in enumerate(free) if i > 1 and token not in free[:i])
    assert greedy(build(StrategyConfig()), PROMPT, 12, stop_id=stop) == free[: free.index(stop)]


def test_nothing_is_made_of_nothing() -> None:
    assert greedy(build(StrategyConfig()), PROMPT, 0) == []
    with pytest.raises(AssertionError, match="nothing to continue"):
        greedy(build(StrategyConfig()), [], 3)
    with pytest.raises(TronError, match="token id 61 is outside"):
        greedy(build(StrategyConfig()), [61], 3)


@pytest.mark.parametrize(
    ("raw", "text", "broken", "left_out"),
    [
        (b"def f(): pass", "def f(): pass", 0, 0),
        ("ü€".encode(), "ü€", 0, 0),
        ("a€".encode()[:-1], "a", 0, 2),
        ("a\U0001f600".encode()[:-1], "a", 0, 3),
        (b"a\xffb", "a\ufffdb", 1, 0),
        (b"a\xffb\xc3", "a\ufffdb", 1, 1),
        (b"a\xff\xff\xff\xff", "a\ufffd\ufffd\ufffd\ufffd", 4, 0),
        (b"", "", 0, 0),
        (b"\xc3", "", 0, 1),
    ],
)
def test_readable_keeps_what_is_text_and_owns_up_to_the_rest(raw: bytes, text: str, broken: int, left_out: int) -> None:
    sample = readable(list(raw), Tokenizer(None))
    assert (sample.text, sample.broken, sample.left_out) == (text, broken, left_out)


def test_the_longest_tail_is_what_a_character_can_leave() -> None:
    assert max(len(chr(code).encode()) for code in (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)) - 1 == sampling.LONGEST_TAIL
