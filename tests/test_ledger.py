"""What a forward and backward of the model sends, held against the closed forms of the strategies' docstrings."""

from collections import Counter

import pytest
import torch

from minimind_tron import collectives
from minimind_tron.collectives import Entry, all_reduce, ledger
from minimind_tron.config import ModelConfig
from minimind_tron.layout import layout_of
from minimind_tron.parallel.data import sum_gradients
from minimind_tron.topology import StrategyConfig
from tests.meshes import STRATEGIES, make_model, random_batch, tiny, tp_mesh

B, S, ITEM = 2, 8, 8  # float64
Sent = Counter[tuple[str, bool, int]]  # how many collectives of a kind, in the backward or not, of so many sent bytes


def book(entries: list[Entry]) -> Sent:
    return Counter((entry.kind, entry.backward, entry.sent_bytes) for entry in entries)


def record_model(config: ModelConfig, strategy: StrategyConfig, seq_len: int = S) -> tuple[Sent, list[Entry]]:
    """A forward and backward, and then the gradient sums."""
    model, batch = make_model(config, strategy), random_batch(B, seq_len, config.vocab_size)
    with ledger() as passes:
        model(batch.ids_BS.T, batch.labels_BS.T).backward()
    with ledger() as sums:
        sum_gradients(model.parameters())
    assert all(entry.axis == "tp" and 0 < entry.start_s <= entry.end_s for entry in passes)
    return book(passes), sums


def reduce(n: int, numbers: int) -> int:
    return 2 * (n - 1) * numbers * ITEM // n


def gather(n: int, numbers: int) -> int:
    """Of a whole of so many numbers: n - 1 times a shard. A reduce-scatter sends the same."""
    return (n - 1) * numbers * ITEM // n


def block(n: int, strategy: StrategyConfig, hidden: int) -> Sent:
    """What a decoder block sends."""
    if not strategy.sequence_parallel:
        return Counter({("all_reduce", False, reduce(n, hidden)): 2, ("all_reduce", True, reduce(n, hidden)): 2})
    size = gather(n, hidden)
    again = 2 if strategy.sp_recompute else 0
    return Counter(
        {
            ("all_gather", False, size): 2,
            ("reduce_scatter", False, size): 2,
            ("all_gather", True, size): 2 + again,
            ("reduce_scatter", True, size): 2,
        }
    )


def ends(n: int, strategy: StrategyConfig, hidden: int, tokens: int) -> Sent:
    """What embedding, head and loss send."""
    if not strategy.vocab_parallel:
        return Counter({("all_reduce", False, reduce(n, 1)): 1} if strategy.sequence_parallel else {})
    found = Counter({("all_reduce", False, reduce(n, tokens)): 1, ("all_reduce", False, reduce(n, 2 * tokens)): 1})
    if not strategy.sequence_parallel:
        return found + Counter({("all_reduce", False, reduce(n, hidden)): 1, ("all_reduce", True, reduce(n, hidden)): 1})
    size = gather(n, hidden)
    again = 1 if strategy.sp_recompute else 0
    found += Counter({("reduce_scatter", False, size): 1, ("all_gather", True, size): 1 + again})
    return found + Counter({("all_gather", False, size): 1, ("reduce_scatter", True, size): 1})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab_parallel", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_pass_sends_its_closed_form(pool, name: str, vocab_parallel: bool, size: int) -> None:
    strategy = STRATEGIES[name].model_copy(update={"vocab_parallel": vocab_parallel})
    ranks = [pool(size).run(record_model, tiny(num_hidden_layers=layers), strategy) for layers in (1, 2, 3)]
    for one, two, three in zip(*([sent for sent, _ in rank] for rank in ranks), strict=True):
        hidden = S * B * tiny().hidden_size
        assert two - one == three - two == block(size, strategy, hidden)
        assert one - (two - one) == ends(size, strategy, hidden, S * B)


def test_a_padded_sequence_sends_its_padding_too(pool) -> None:
    for short, padded in zip(
        pool(4).run(record_model, tiny(), STRATEGIES["sp"], 5), pool(4).run(record_model, tiny(), STRATEGIES["sp"], 8), strict=True
    ):
        assert short[0] == padded[0]


def summed_by_axes(sums: list[Entry]) -> dict[str, list[int]]:
    by_axis: dict[str, list[int]] = {}
    for entry in sums:
        assert (entry.kind, entry.backward) == ("all_reduce", False)
        by_axis.setdefault(entry.axis, []).append(entry.sent_bytes)
    return by_axis


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("name", "vocab_parallel"), [("tp", False), ("tp", True), ("sp", False), ("sp", True)])
def test_gradient_sums(pool, name: str, vocab_parallel: bool, kv_heads: int, size: int) -> None:
    """One all-reduce for each set of axes: q and k norms; kv heads that ranks share; under SP what saw this rank's tokens only."""
    config = tiny(num_key_value_heads=kv_heads, attention_bias=True)
    D, H, layers, V = config.hidden_size, config.head_width, config.num_hidden_layers, config.vocab_size
    numbers = layers * 2 * H
    if name == "sp":
        numbers += (2 * layers + 1) * D + layers * D + (0 if vocab_parallel else V * D)
    shared = layers * 2 * (D + 1) * max(1, kv_heads // size) * H if kv_heads < size else 0
    expected = {"tp": [reduce(size, numbers + (shared if kv_heads == 1 else 0))]}
    if kv_heads == 2 and size == 4:
        expected["tp/2"] = [reduce(2, shared)]
    strategy = STRATEGIES[name].model_copy(update={"vocab_parallel": vocab_parallel})
    for _, sums in pool(size).run(record_model, config, strategy):
        assert summed_by_axes(sums) == expected


def sum_of_missing_gradients() -> bool:
    """A weight without a gradient on one rank counts as zeros, and what is summed in bfloat16 is summed in float32."""
    model = make_model(tiny(), dtype=torch.bfloat16)
    norm = model.model.layers["0"].self_attn.q_norm.weight
    assert layout_of(norm).partial
    if tp_mesh().tp.rank == 1:
        norm.grad = torch.ones_like(norm)
    with ledger() as sums:
        sum_gradients([norm])
    assert [entry.sent_bytes for entry in sums] == [norm.numel() * 4]
    return bool(norm.grad.eq(1).all())


def test_missing_gradients_count_as_zeros(pool) -> None:
    assert pool(2).run(sum_of_missing_gradients) == [True, True]


def recorded_outside() -> int:
    with ledger() as entries:
        pass
    with pytest.raises(RuntimeError, match="on the way"), ledger() as broken:
        raise RuntimeError("on the way")
    all_reduce(torch.ones(3), tp_mesh().tp)
    assert collectives._ledger is None
    return len(entries) + len(broken)


def test_off_it_records_nothing(pool) -> None:
    assert pool(2).run(recorded_outside) == [0, 0]
    assert pool(1).run(record_model, tiny(), STRATEGIES["sp"]) == [(Counter(), [])]


def test_nesting_is_refused() -> None:
    with ledger() as outer:
        with pytest.raises(AssertionError, match="open already"), ledger():
            pass
        assert collectives._ledger is outer
