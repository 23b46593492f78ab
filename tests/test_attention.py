"""Attention block by block: kernels, merging, the ways of context parallelism against Qwen3's own, their work and their memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise as neighbours
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from measurements.storages import Storages
from minimind_tron.collectives import gather_copies
from minimind_tron.errors import TronError
from minimind_tron.mesh import Axis
from minimind_tron.model import choose_attention
from minimind_tron.parallel import attention, ring
from minimind_tron.parallel.attention import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    PLAIN,
    Attended,
    Gradients,
    Kernel,
    Tile,
    check_mask,
    fold,
    kernel_for,
    merge,
    zeros_for,
)
from minimind_tron.parallel.context import SequenceMap
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.meshes import make_model, mesh_of, randn, tiny

WAYS = ("all_gather", "a2a", "ring")
LAYOUTS = ("contiguous", "zigzag")


def written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention on folded heads, whole scores and all."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def apart(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 distance."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300))


# Kernels


def compare_kernel(kernel: Kernel, rows: int, keys: int, causal: bool, dtype: torch.dtype, device: str = "cpu") -> float:
    """The largest error of a kernel on grouped heads, keys read in place, queries a part of a longer sequence as in the ring."""
    q_SBnH = randn(rows + 3, 2, 6, 8, seed=0, dtype=dtype).to(device)
    kv = randn(2, keys, 2, 2, 8, seed=1, dtype=dtype).to(device)
    dout = fold(randn(rows, 2, 6, 8, seed=2, dtype=dtype).to(device), 2)
    q, (k, v) = fold(q_SBnH, 2)[:, :, 3:], (fold(x, 2) for x in kv.unbind(0))
    each_k, each_v = (x.expand(-1, 3, -1, -1) for x in (k, v))
    out, lse = kernel.forward(q, each_k, each_v, causal)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in (q, each_k, each_v)]
    want_out, want_lse = written_out(*wide, causal)
    want_out.backward(dout.double())
    # Gradients hands on one query head of a kv head at a time, as views into all of them.
    heads = [[x[:, g : g + 1] for x in (dout, q, out, lse)] for g in range(3)]
    each = [kernel.backward(dout, q, k, v, out, lse, causal) for dout, q, out, lse in heads]
    found = [torch.cat(gradients, 1) for gradients in zip(*each, strict=True)]
    errors = [apart(out, want_out.detach()), apart(lse, want_lse.detach())]
    # A token that sees itself alone gives q and k nothing.
    return max(errors + [apart(g, x.grad) for g, x in zip(found, wide, strict=True) if x.grad.norm() > 1e-12])


LENGTHS = ((1, 1, True), (7, 7, True), (16, 16, True), (5, 9, False), (9, 4, False), (1, 3, False))
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=["flash", "plain"])
@pytest.mark.parametrize(("rows", "keys", "causal"), LENGTHS)
def test_a_kernel_is_attention_written_out(kernel: Kernel, rows: int, keys: int, causal: bool, dtype: torch.dtype) -> None:
    assert compare_kernel(kernel, rows, keys, causal, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize(("rows", "keys", "causal"), LENGTHS)
def test_the_plain_kernel_goes_block_by_block(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, causal: bool) -> None:
    monkeypatch.setattr(attention, "PLAIN_BLOCK", 4)
    seen: list[int] = []
    right = attention._plain_scores
    monkeypatch.setattr(attention, "_plain_scores", lambda *given: seen.append((s := right(*given)).shape[-2:].numel()) or s)
    assert compare_kernel(PLAIN, rows, keys, causal, torch.float64) < 1e-13
    assert max(seen) <= 16


def test_the_plain_kernel_goes_over_more_than_a_block() -> None:
    more = attention.PLAIN_BLOCK + 5
    assert max(compare_kernel(PLAIN, *lengths, False, torch.float64) for lengths in ((3, more), (more, 3))) < 1e-13


def test_the_cpu_has_a_fused_kernel_and_other_devices_a_plain_one() -> None:
    q = torch.empty(1, 1, 4, 8)
    assert kernel_for(q, q, q, True) is CPU_FLASH
    assert kernel_for(*[q.to("meta")] * 3, True) is PLAIN


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kernel", "within"),
    [(torch.bfloat16, CUDA_FLASH, 2e-2), (torch.float32, CUDA_EFFICIENT, 2e-3), (torch.float64, PLAIN, 1e-13)],
    ids=["bfloat16", "float32", "float64"],
)
@pytest.mark.parametrize(("rows", "keys", "causal"), LENGTHS)
def test_the_kernels_of_a_gpu(dtype: torch.dtype, kernel: Kernel, within: float, rows: int, keys: int, causal: bool) -> None:
    q = torch.empty(4, 3, rows, 8, dtype=dtype, device="cuda")
    assert kernel_for(q, q, q, causal) is kernel
    assert compare_kernel(kernel, rows, keys, causal, dtype, "cuda") < within


# Blocks


def parts_of(scale: float) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of some queries over each of three blocks of keys, then over all of them."""
    q, k, v = (randn(2, 1, n, 4, seed=n) * scale for n in (5, 12, 13))
    v = v[:, :, :12]
    blocks = [(k[:, :, i : i + 4], v[:, :, i : i + 4]) for i in (0, 4, 8)]
    return [written_out(q, *block, causal=False) for block in (*blocks, (k, v))]


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_blocks_merge_in_any_order(order: tuple[int, ...], scale: float) -> None:
    *blocks, whole = parts_of(scale)
    out, lse = (x.clone() for x in blocks[order[0]])
    for number in order[1:]:
        merge(out, lse, *blocks[number])
    torch.testing.assert_close((out, lse), whole, rtol=1e-12, atol=1e-12)
    assert apart(blocks[0][0], whole[0]) > 1e-3, "one block alone is not the whole"


def test_nothing_seen_so_far_adds_nothing() -> None:
    block = parts_of(1.0)[0]
    none = torch.zeros_like(block[0]), torch.full_like(block[1], -torch.inf)
    for first, second in ((block, none), (none, block)):
        out, lse = (x.clone() for x in first)
        merge(out, lse, *second)
        torch.testing.assert_close((out, lse), block, rtol=0, atol=0)
    out, lse = (x.clone() for x in none)
    merge(out, lse, *none)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def in_blocks(bounds: tuple[int, ...], lse_off_by: float = 0.0, left_out: int | None = None) -> list[float]:
    """The errors of out, dq, dk and dv of the last queries of 12 tokens, earlier keys coming in blocks."""
    q, k, v, dout = (randn(12, 2, heads, 6, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2, 4)))
    first = bounds[-2]
    tiles = [(slice(a, b), Tile(slice(0, 12 - first), slice(0, b - a), causal=b == 12)) for a, b in neighbours(bounds)][::-1]
    kv, mine = torch.stack((k, v)).detach(), q.detach()[first:]
    attended = Attended(mine, 2)
    for number, (keys, tile) in enumerate(tiles):
        if number != left_out:
            attended.add(kv[:, keys], tile)
    out, lse = attended.result()
    into, gradients = zeros_for(kv), Gradients(dout.detach()[first:], mine, out, lse + lse_off_by, 2)
    for keys, tile in tiles:
        gradients.add(kv[:, keys], tile, into[:, keys])
    whole, _ = written_out(*(x.permute(1, 2, 0, 3).repeat_interleave(n, 1) for x, n in ((q, 1), (k, 2), (v, 2))), causal=True)
    want = whole.permute(2, 0, 1, 3)[first:]
    want.backward(dout.detach()[first:])
    dq, dk, dv = gradients.results(into)
    return [apart(out, want.detach()), apart(dq, q.grad[first:]), apart(dk, k.grad), apart(dv, v.grad)]


@pytest.mark.parametrize("bounds", [(0, 12), (0, 6, 12), (0, 1, 5, 11, 12), (0, 4, 8, 12)])
def test_blocks_of_keys_are_the_whole(bounds: tuple[int, ...]) -> None:
    assert max(in_blocks(bounds)) < 1e-13


def test_what_several_blocks_add_to_is_float32_or_wider() -> None:
    every = Tile(slice(0, 4), slice(0, 4))
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        q, block = randn(4, 1, 2, 8, seed=0, dtype=dtype), randn(2, 4, 1, 2, 8, seed=1, dtype=dtype)
        attended = Attended(q, 2)
        attended.add(block, every)
        attended.add(block, every)
        assert attended.out is not None
        assert attended.lse is not None
        assert (attended.out.dtype, attended.lse.dtype) == (wide, wide)
        out, lse = attended.result()
        gradients, into = Gradients(q, q, out, lse, 2), zeros_for(block)
        gradients.add(block, every, into)
        assert (out.dtype, gradients.dq.dtype, into.dtype) == (dtype, wide, wide)
        assert {x.dtype for x in gradients.results(into)} == {dtype}


def test_a_block_left_out_and_a_wrong_sum_are_seen() -> None:
    assert min(in_blocks((0, 6, 12), left_out=1)) > 1e-2
    out, *gradients = in_blocks((0, 6, 12), lse_off_by=0.1)
    assert out < 1e-13
    assert min(gradients) > 1e-2


# Masks


def mask_of(*samples: str) -> Tensor:
    """Samples as words of 1 and 0. Shapes: -> [S, B]."""
    return torch.tensor([[int(letter) for letter in sample] for sample in samples]).T


@pytest.mark.parametrize("samples", [("111",), ("110", "111", "100"), ("000",), ("1",)])
def test_padding_at_the_end_is_what_causal_attention_honours(samples: tuple[str, ...]) -> None:
    mask = mask_of(*samples)
    for given in (mask, mask.bool(), None):
        check_mask(given, torch.zeros_like(mask))


def test_the_model_takes_padding_at_the_end() -> None:
    model, ids, mask = make_model(tiny()), torch.arange(8).view(4, 2), mask_of("1100", "1111")
    labels = ids.masked_fill(mask == 0, -100)
    other = ids.masked_fill(mask == 0, 5)
    for spelt in (mask, mask.bool()):
        assert torch.equal(model.logits(ids, spelt), model.logits(ids))
        assert torch.equal(model(ids, labels, spelt), model(ids, labels))
    assert torch.equal(model.logits(ids)[mask == 1], model.logits(other)[mask == 1]), "no token sees padding"
    assert torch.equal(model(ids, labels), model(other, labels))


@pytest.mark.parametrize(("samples", "index"), [(("011",), 0), (("111", "101"), 1), (("110", "100", "001"), 2)])
def test_any_other_mask_is_refused(samples: tuple[str, ...], index: int) -> None:
    model, ids = make_model(tiny()), torch.ones(len(samples[0]), len(samples), dtype=torch.long)
    mask = mask_of(*samples)
    for attempt in (lambda: check_mask(mask.bool(), ids), lambda: model(ids, ids, mask), lambda: model.logits(ids, mask)):
        with pytest.raises(TronError, match=rf"hides a token before one it shows \(sample {index}\)"):
            attempt()
    padding = mask_of(*["1" * len(samples[0])] * len(samples))
    assert torch.equal(model.logits(ids, padding), model.logits(ids))
    assert torch.equal(model(ids, ids, padding), model(ids, ids))


# The ways, against Qwen3's own attention


def qwen3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """transformers' attention of Qwen3, its softmax lifted to float64. Shapes: [S, B, n, H], [S, B, k, H] twice -> [S, B, n, H]."""
    from transformers.models.qwen3 import modeling_qwen3

    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    mask = torch.full((len(q), len(q)), -torch.inf, dtype=q.dtype).triu(1)
    lifted = mock.patch.object(modeling_qwen3.nn.functional, "softmax", lambda x, dim, dtype: x.softmax(dim))
    with lifted:
        heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out, _ = modeling_qwen3.eager_attention_forward(module, *heads, mask[None, None], scaling=q.shape[-1] ** -0.5)
    return out.transpose(0, 1)


def cp_axis(size: int) -> Axis:
    return mesh_of(MeshConfig(cp_size=size)).cp


Case = tuple[str, str, int, int]  # way, layout, kv heads, tokens


def tensors_of(kv_heads: int, tokens: int, dtype: torch.dtype, width: int = 4) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, alike on every rank."""
    return [randn(tokens, 2, heads, width, seed=i, dtype=dtype) for i, heads in enumerate((8, kv_heads, kv_heads, 8))]


def through(axis: Axis, case: Case, dtype: torch.dtype, regather: bool = True, width: int = 4) -> list[Tensor]:
    """Output, dq, dk and dv of a way, gathered whole; what padding got is left in, after the tokens."""
    way, layout, _, tokens = case
    sequence = SequenceMap(axis, layout)
    attend = choose_attention(sequence, StrategyConfig(cp_comm_type=way, cp_layout=layout, cp_regather=regather))
    missing = -tokens % sequence.multiple(1)
    # Padding is rubbish as a key and gets no gradient as a query.
    rubbish = [torch.nn.functional.pad(x, (0, 0) * 3 + (0, missing), value=9.0) for x in tensors_of(*case[2:], dtype, width)[:3]]
    dout = torch.nn.functional.pad(tensors_of(*case[2:], dtype, width)[3], (0, 0) * 3 + (0, missing))
    mine = [sequence.own(x).requires_grad_() for x in rubbish]
    out = attend(*mine)
    out.backward(sequence.own(dout))
    return [sequence.join(gather_copies(x.detach(), axis)) for x in (out, *(x.grad for x in mine))]


@lru_cache(maxsize=32)
def reference(kv_heads: int, tokens: int, dtype: torch.dtype, width: int = 4) -> list[Tensor]:
    """What Qwen3's attention makes of the same numbers in float64."""
    *whole, dout = (x.double() for x in tensors_of(kv_heads, tokens, dtype, width))
    whole = [x.requires_grad_() for x in whole]
    out = qwen3(*whole)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in whole)]


def on_first_rank(size: int, cases: list[Case], *how: Any) -> list[list[Tensor]]:
    """What ``through`` gives for every case; all ranks have the same, and the first one sends it."""
    found = [through(cp_axis(size), case, *how) for case in cases]
    return found if cp_axis(size).rank == 0 else []


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_the_attention_of_qwen3(pool, way: str, size: int) -> None:
    cases = list(product((way,), LAYOUTS, (8, 2, 1), (15, 16, 33)))
    for regather in (True, False)[: 2 if way == "all_gather" else 1]:
        for case, ours in zip(cases, pool(size).run(on_first_rank, size, cases, torch.float64, regather)[0], strict=True):
            *_, kv_heads, tokens = case
            assert all(x[tokens:].eq(0).all() for x in ours[1:]), f"{case}: padding has a gradient"
            pairs = zip(ours, reference(kv_heads, tokens, torch.float64), strict=True)
            assert max(apart(x[:tokens], wanted) for x, wanted in pairs) < 1e-13, case


def with_the_plain_kernel(size: int, cases: list[Case]) -> list[list[Tensor]]:
    """``on_first_rank`` as on a device without a fused kernel, in blocks smaller than a rank's tokens."""
    with mock.patch.object(attention, "kernel_for", return_value=PLAIN), mock.patch.object(attention, "PLAIN_BLOCK", 3):
        return on_first_rank(size, cases, torch.float64)


def test_the_plain_kernel_does_in_every_way(pool) -> None:
    cases = list(product(WAYS, LAYOUTS, (2,), (33,)))
    for case, ours in zip(cases, pool(2).run(with_the_plain_kernel, 2, cases)[0], strict=True):
        pairs = zip(ours, reference(2, 33, torch.float64), strict=True)
        assert max(apart(x[:33], wanted) for x, wanted in pairs) < 1e-13, case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_in_bfloat16_eight_ranks_are_as_near_as_one(pool, way: str, layout: str) -> None:
    case = way, layout, 2, 256
    wanted = reference(2, 256, torch.bfloat16, 16)
    one, eight = (pool(size).run(on_first_rank, size, [case], torch.bfloat16, True, 16)[0][0] for size in (1, 8))
    one, eight = ([apart(x, want) for x, want in zip(ours, wanted, strict=True)] for ours in (one, eight))
    ratios = [b / a for a, b in zip(one, eight, strict=True)]
    assert max(ratios) <= 1.5, ratios
    assert min(one) > 1e-4, "bfloat16 rounds"


# Work


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Pairs of query and key, times heads, that the kernels really compute, forward and backward."""
    pairs = {"forward": 0, "backward": 0}
    right = attention.kernel_for

    def count(way: str, q: Tensor, k: Tensor, causal: bool) -> None:
        rows = q.shape[2]
        pairs[way] += q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * k.shape[2])

    def chosen(*given: Any) -> Kernel:
        kernel = right(*given)

        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
            count("forward", q, k, causal)
            return kernel.forward(q, k, v, causal)

        def backward(dout: Tensor, q: Tensor, k: Tensor, *rest: Any) -> Any:
            count("backward", q, k, rest[-1])
            return kernel.backward(dout, q, k, *rest)

        return Kernel(forward, backward)

    with mock.patch.object(attention, "kernel_for", chosen):
        yield pairs


def work(size: int, case: Case) -> dict[str, int]:
    with counted() as pairs:
        through(cp_axis(size), case, torch.float64)
    return pairs


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_zigzag_gives_every_rank_the_same_work(pool, way: str, layout: str, size: int) -> None:
    tokens = 64
    ranks = pool(size).run(work, size, (way, layout, 2, tokens))
    for passed in ("forward", "backward"):
        pairs = [rank[passed] for rank in ranks]
        assert sum(pairs) == 2 * 8 * tokens * (tokens + 1) // 2, "all pairs of both samples and 8 heads, once"
        if way == "a2a" or layout == "zigzag":
            assert max(pairs) <= 1.01 * min(pairs)
        else:
            share = tokens // size
            assert pairs == [16 * (share * (share + 1) // 2 + rank * share**2) for rank in range(size)]
            assert max(pairs) > 0.9 * (2 * size - 1) * min(pairs), "the last rank does about 2 cp - 1 times the work of the first"


# Memory


def kept_by_attention(size: int, tokens: int) -> int:
    """Bytes that the attention of 8 layers keeps for the backward, counted by storages."""
    config = tiny(num_hidden_layers=8, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    model = make_model(config, StrategyConfig(cp_comm_type="ring"), torch.float32, mesh_of(MeshConfig(cp_size=size)))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def watched(attend: Callable[..., Tensor], *given: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda x: x):
            return attend(*given)

    for block in model.model.layers.values():
        block.self_attn.attend = partial(watched, block.self_attn.attend)
    ids = torch.randint(37, (tokens, 1), generator=torch.Generator().manual_seed(0))
    loss = model(ids, ids)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("tokens", [4096, pytest.param(32768, marks=pytest.mark.full)])
def test_a_rank_keeps_its_share_of_what_the_dense_model_keeps(pool, tokens: int) -> None:
    (dense,) = pool(1).run(kept_by_attention, 1, tokens)
    ranks = pool(4).run(kept_by_attention, 4, tokens, timeout_s=600.0)
    # q and the output, k and v, and one log-sum-exp a head.
    assert dense == 8 * tokens * (2 * 8 + 2 * 4 + 2) * 4
    assert all(0.25 * dense <= rank <= 0.26 * dense for rank in ranks)


class Blocks(Storages):
    """Storages the size of a block of K and V, and those of one of the two or of a chunk of it, which a kernel's dk and dv are."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self.sizes = block_bytes, block_bytes // 2, block_bytes // 4

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Its dq, as large as its dk, is no block.
        dq, dk, dv = func(*args, **(kwargs or {}))
        for x in (dk, dv):
            self._count(x.untyped_storage())
        return dq, dk, dv

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() in self.sizes:
            super()._count(storage)


def blocks_alive(size: int, layout: str, hoards: bool) -> tuple[float, float]:
    """The most blocks alive beside the inputs, in the forward and in the backward; ``hoards``: who receives forgets nothing."""
    axis, kept = cp_axis(size), []
    right = ring.start_shift

    def shift(x: Tensor, axis: Axis) -> Any:
        kept.append(pending := right(x, axis))
        kept.append(x)
        return pending

    sequence = SequenceMap(axis, layout)
    # With 6 query heads nothing of the queries is the size of a block or of a part of it.
    q, k, v, dout = (sequence.own(randn(64, 2, heads, 4, seed=heads)) for heads in (6, 2, 2, 6))
    for x in (q, k, v):
        x.requires_grad_()
    block_bytes = 2 * k.numel() * k.element_size()
    with mock.patch.object(ring, "start_shift", shift if hoards else right):
        with Blocks(block_bytes) as forward:
            out = ring.attend(q, k, v, sequence)
        with Blocks(block_bytes) as backward:
            out.backward(dout)
    return forward.peak / block_bytes, backward.peak / block_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_two_remote_blocks_are_alive_at_most(pool, size: int, layout: str) -> None:
    for forward, backward in pool(size).run(blocks_alive, size, layout, False):
        # Its own packed K and V, and two that came or are coming.
        assert forward <= 1 + 2
        # The gradient of its own, two blocks of K and V, two of gradients; its own block was there before.
        assert backward <= 1 + 2 + 2
    hoarded = pool(4).run(blocks_alive, 4, layout, True)
    assert all(forward > 3 for forward, _ in hoarded)
    assert all(backward > 5 for _, backward in hoarded)


class OfSize(Storages):
    """Storages of some bytes, as a number of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @property
    def most(self) -> float:
        """The most that were there at once."""
        return self.peak / self.size

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() == self.size:
            super()._count(storage)


def blocks_by_kind(size: int, layout: str, hoards: str = "") -> tuple[float, float]:
    """The most blocks of K and V that came or are coming in a backward, and of gradients; ``hoards``: what no sender forgets.

    In bfloat16 the gradients travel in float32, so that storages of the two differ in size.
    """
    axis, right = cp_axis(size), ring.start_shift
    sequence = SequenceMap(axis, layout)
    dtypes, kept = {"": None, "keys": torch.bfloat16, "gradients": torch.float32}, []

    def shift(x: Tensor, axis: Axis) -> Any:
        if x.dtype == dtypes[hoards]:
            kept.append(x)
        return right(x, axis)

    q, k, v, dout = (sequence.own(randn(64, 2, heads, 4, seed=heads, dtype=torch.bfloat16)) for heads in (6, 2, 2, 6))
    out = ring.attend(q.requires_grad_(), k.requires_grad_(), v, sequence)
    block_bytes = 2 * k.numel() * k.element_size()
    with mock.patch.object(ring, "start_shift", shift), OfSize(block_bytes) as keys, OfSize(2 * block_bytes) as gradients:
        out.backward(dout)
    return keys.most, gradients.most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_their_gradients_are_two_blocks_each(pool, layout: str) -> None:
    # The gradient of its own block is beside those that travel.
    assert pool(4).run(blocks_by_kind, 4, layout) == [(2, 1 + 2)] * 4
    assert all(keys > 2 for keys, _ in pool(4).run(blocks_by_kind, 4, layout, "keys"))
    assert all(gradients > 1 + 2 for _, gradients in pool(4).run(blocks_by_kind, 4, layout, "gradients"))


def test_no_scores_of_all_tokens_are_ever_held() -> None:
    tokens = 2048
    q, k, v, dout = tensors_of(2, tokens, torch.float32)
    for way in WAYS:
        attend = choose_attention(SequenceMap(Axis("cp")), StrategyConfig(cp_comm_type=way))
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with Storages() as storages:
            attend(*inputs).backward(dout)
        assert storages.peak < math.prod((tokens, tokens, 2, 8)) * 4 / 16
