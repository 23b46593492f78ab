"""What a forward and backward of the model sends, held against the closed forms of the strategies' docstrings."""

import math
from collections import Counter

import pytest
import torch

from minimind_tron import ledger as ledgers
from minimind_tron.collectives import all_reduce
from minimind_tron.config import ModelConfig
from minimind_tron.ledger import Entry, ledger
from minimind_tron.step import compute_gradients
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.meshes import STRATEGIES, make_model, mesh_of, random_batch, sum_by_hand, tiny, tp_mesh

B, S, ITEM = 2, 8, 8  # float64
NORM = "self_attn.q_norm"
Sent = Counter[tuple[str, bool, int]]  # how many collectives of a kind, in the backward or not, of so many sent bytes


def book(entries: list[Entry]) -> Sent:
    return Counter((entry.kind, entry.backward, entry.sent_bytes) for entry in entries)


def record_model(config: ModelConfig, strategy: StrategyConfig, seq_len: int = S) -> tuple[Sent, list[Entry]]:
    """A forward and backward, and then the gradient sums over tp."""
    model, batch = make_model(config, strategy), random_batch(B, seq_len, config.vocab_size)
    with ledger() as entries:
        compute_gradients(model, batch, B)
    passes, sums = [entry for entry in entries if entry.action], [entry for entry in entries if not entry.action]
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


# Context parallelism


def record_context(config: ModelConfig, mesh: MeshConfig, strategy: StrategyConfig, seq_len: int, dtype: torch.dtype) -> Sent:
    """What attention sends over cp in a gradient pass: the sums of gradients are the only all-reduces there."""
    model, batch = make_model(config, strategy, dtype, mesh_of(mesh)), random_batch(B, seq_len, config.vocab_size)
    with ledger() as entries:
        compute_gradients(model, batch, B)
    return book([entry for entry in entries if entry.axis == "cp" and entry.kind != "all_reduce"])


def attention(way: str, cp: int, tokens: int, heads: tuple[int, int], strategy: StrategyConfig, item: int = ITEM) -> Sent:
    """What a layer's attention sends: ``tokens`` and ``heads`` (query and kv) are a rank's; sums are float32 or wider."""
    n, k = heads
    block, H = tokens * B * 2 * k * tiny().head_width, tiny().head_width
    summed = (cp - 1) * block * max(item, 4)
    if way == "ring":
        sent = [("shift", False, block * item), ("shift", True, block * item), ("shift", True, block * max(item, 4))]
        return Counter(sent * (cp - 1))
    if way == "all_gather":
        again = [("all_gather", True, (cp - 1) * block * item)] * strategy.cp_regather
        return Counter([("all_gather", False, (cp - 1) * block * item), *again, ("reduce_scatter", True, summed)])
    there = tokens * B * (n + 2 * math.lcm(k, cp)) * H * item * (cp - 1) // cp
    back = tokens * B * n * H * item * (cp - 1) // cp
    return Counter([("all_to_all", backward, size) for backward in (False, True) for size in (there, back)])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("way", "regather"), [("ring", True), ("all_gather", True), ("all_gather", False), ("a2a", True)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mesh", [MeshConfig(cp_size=2), MeshConfig(cp_size=4), MeshConfig(cp_size=2, tp_size=2)], ids=str)
def test_a_way_sends_its_closed_form(pool, mesh: MeshConfig, kv_heads: int, way: str, regather: bool, layout: str) -> None:
    sp = mesh.tp_size > 1
    strategy = StrategyConfig(sequence_parallel=sp, cp_comm_type=way, cp_layout=layout, cp_regather=regather)
    multiple = math.lcm(2 if layout == "zigzag" else 1, mesh.tp_size)
    tokens = -(-13 // (mesh.cp_size * multiple)) * multiple
    for dtype, item in ((torch.float64, 8), (torch.bfloat16, 2)) if kv_heads == 2 else ((torch.float64, 8),):
        heads = 4 // mesh.tp_size, max(1, kv_heads // mesh.tp_size)
        expected = attention(way, mesh.cp_size, tokens, heads, strategy, item)
        ranks = [
            pool(mesh.world_size).run(
                record_context, tiny(num_key_value_heads=kv_heads, num_hidden_layers=layers), mesh, strategy, 13, dtype
            )
            for layers in (1, 2)
        ]
        for one, two in zip(*ranks, strict=True):
            assert one == two - one == expected, "nothing but attention sends over cp"


def summed_over_cp(mesh: MeshConfig) -> list[tuple[str, int]]:
    model = make_model(tiny(), mesh=mesh_of(mesh))
    with ledger() as entries:
        sum_by_hand(model, lambda _, weight: torch.ones_like(weight))
    return [(entry.axis, entry.sent_bytes) for entry in entries]


def test_gradients_are_summed_over_cp_once(pool) -> None:
    """One all-reduce a segment, in the order of the backward; what is a part over tp as well is summed over tp after that."""
    norms, head, table = 2 * tiny().head_width, tiny().hidden_size, tiny().vocab_size * tiny().hidden_size
    block = (tiny().num_parameters - head - table) // tiny().num_hidden_layers
    expected = [("cp", reduce(2, numbers)) for numbers in (head, block, block, table)]
    assert pool(2).run(summed_over_cp, MeshConfig(cp_size=2)) == [expected] * 2
    whole = 2 * tiny().hidden_size + norms
    share = whole + (block - whole) // 2
    expected = [("cp", reduce(2, numbers)) for numbers in (head, share, share, table)]
    after = [("tp", reduce(2, norms * tiny().num_hidden_layers))]
    assert pool(4).run(summed_over_cp, MeshConfig(cp_size=2, tp_size=2)) == [expected + after] * 4


def sum_of_missing_gradients(mesh: MeshConfig) -> tuple[list[int], bool]:
    """A weight without a gradient on one rank counts as zeros, and what is summed in bfloat16 is summed in float32."""
    model = make_model(tiny(), dtype=torch.bfloat16, mesh=mesh_of(mesh))
    with ledger() as sums:
        sum_by_hand(model, lambda name, weight: torch.ones_like(weight) if model.mesh.rank == 1 and NORM in name else None)
    found = model.masters.gradients()
    right = all(gradient.eq(1.0 if NORM in name else 0.0).all() for name, (gradient, _) in found.items())
    return [entry.sent_bytes for entry in sums], bool(right and len(found) == len(list(model.parameters())))


def test_missing_gradients_count_as_zeros(pool) -> None:
    norms = tiny().num_hidden_layers * 2 * tiny().head_width
    for sent, right in pool(2).run(sum_of_missing_gradients, MeshConfig(tp_size=2)):
        assert sent == [norms * 4]
        assert right
    for sent, right in pool(2).run(sum_of_missing_gradients, MeshConfig(cp_size=2)):
        assert sum(sent) == tiny().num_parameters * 4
        assert right


def recorded_outside() -> int:
    with ledger() as entries:
        pass
    with pytest.raises(RuntimeError, match="on the way"), ledger() as broken:
        raise RuntimeError("on the way")
    all_reduce(torch.ones(3), tp_mesh().tp)
    assert ledgers._ledger is None
    return len(entries) + len(broken)


def test_off_it_records_nothing(pool) -> None:
    assert pool(2).run(recorded_outside) == [0, 0]
    assert pool(1).run(record_model, tiny(), STRATEGIES["sp"]) == [(Counter(), [])]


def test_nesting_is_refused() -> None:
    with ledger() as outer:
        with pytest.raises(AssertionError, match="open already"), ledger():
            pass
        assert ledgers._ledger is outer
