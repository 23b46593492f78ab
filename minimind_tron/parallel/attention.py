"""What the ways of context parallelism share about attention: one block of keys at a time, its two gradients, and the merge.

Causal attention over a long sequence is a sum over blocks of keys. A block gives an output and, for every query, the log of the sum
of its exponentials (lse); two of those merge into the output over both blocks, in any order. The backward needs no merge: with
the final output and lse, every block gives its own share of dq and the whole of what these queries hand to its dk and dv.

The local kernel is PyTorch's fused attention with its lse: flash on the CPU, and on a GPU what torch says it can use there; else
a plain one, block by block. None of them holds S x S scores. Heads are folded so that a kv head is read in place by all the
query heads it serves: q is [B k, g, S, H], k and v are [B k, 1, S, H], where g = n / k.

Source: Dao et al., FlashAttention, arXiv 2205.14135, for blocks and lse; Liu et al., Ring Attention, arXiv 2310.01889, for merging
across ranks. Running maximum and running sum are one number here, their lse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.backends import cuda

from minimind_tron.errors import TronError
from minimind_tron.layout import wider

aten = torch.ops.aten
# Queries and keys of a block of the plain kernel: 512 x 512 scores a head are 1 MiB in float32.
PLAIN_BLOCK = 512
# The efficient kernel wants its lse in multiples of this many queries.
EFFICIENT_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """Which of a rank's queries see which keys of a block: every one of these rows all of these keys, or causally."""

    rows: slice
    keys: slice
    causal: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key it sees; attention's work is proportional to it."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * keys


def own_tile(tokens: int) -> Tile:
    """What a rank's queries see of its own keys."""
    return Tile(slice(0, tokens), slice(0, tokens), causal=True)


def check_mask(mask_SB: Tensor | None, ids_SB: Tensor) -> None:
    """Refuse a mask that causal attention does not honour by itself; True (or 1) marks tokens that may be seen.

    Padding at the end of a sample is honoured: no token before it sees it.
    Raises: TronError for a mask of another shape than the ids or of fractions, and one that names the first sample with a hidden
    token before a visible one.
    """
    if mask_SB is None:
        return
    if mask_SB.shape != ids_SB.shape or mask_SB.is_floating_point():
        raise TronError(
            f"a mask of {mask_SB.dtype} {tuple(mask_SB.shape)} was given with ids of {tuple(ids_SB.shape)}",
            "give True or 1 for every token that may be seen, in the order [S, B] of the ids",
        )
    holes = (~mask_SB[:-1].bool() & mask_SB[1:].bool()).any(0)
    if holes.any():
        raise TronError(
            f"the mask hides a token before one it shows (sample {int(holes.int().argmax())}), and attention here is causal only",
            "pad samples at their end, and set labels to -100 where nothing is to be learned",
        )


def fold(x_SBnH: Tensor, kv_heads: int) -> Tensor:
    """Heads beside the samples, grouped by the kv head they use; a view where the input is contiguous.

    Shapes: [S, B, n, H] -> [B k, g, S, H].
    """
    S, B, n, H = x_SBnH.shape
    return x_SBnH.reshape(S, B * kv_heads, n // kv_heads, H).permute(1, 2, 0, 3)


Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """Attention of some queries over one block of keys, on folded heads, q and k having as many heads as each other.

    ``forward(q, k, v, causal)`` gives out and lse [.., S]; ``backward(dout, q, k, v, out, lse, causal)`` gives dq, dk and dv, where
    out and lse are those over all keys.
    """

    forward: Forward
    backward: Backward


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor], aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)
    return cast(tuple[Tensor, Tensor, Tensor], found)


def _no_seeds(q: Tensor) -> tuple[Tensor, Tensor]:
    """State of a random generator that only dropout would ask."""
    return q.new_empty(0, dtype=torch.int64), q.new_empty(0, dtype=torch.int64)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = q.shape[2], k.shape[2]
    found = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, *_no_seeds(q)
    )
    return cast(tuple[Tensor, Tensor, Tensor], found)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_ROWS), value=torch.inf)
    found = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *_no_seeds(q), 0.0, [True, True, True, False], causal
    )
    return cast(tuple[Tensor, Tensor, Tensor], found[:3])


def _plain_blocks(queries: int, keys: int, causal: bool) -> list[tuple[slice, slice]]:
    """Pairs of query and key blocks of which at least one pair is seen."""
    rows = [slice(i, min(i + PLAIN_BLOCK, queries)) for i in range(0, queries, PLAIN_BLOCK)]
    columns = [slice(i, min(i + PLAIN_BLOCK, keys)) for i in range(0, keys, PLAIN_BLOCK)]
    return [(row, column) for row in rows for column in columns if not causal or column.start < row.stop]


def _plain_scores(q: Tensor, k: Tensor, row: slice, column: slice, causal: bool) -> Tensor:
    dtype = wider(q.dtype)
    scores = q[:, :, row].to(dtype) @ k[:, :, column].to(dtype).mT / q.shape[-1] ** 0.5
    if causal:
        future = torch.arange(column.start, column.stop)[None, :] > torch.arange(row.start, row.stop)[:, None]
        scores = scores.masked_fill(future.to(q.device), -torch.inf)
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    dtype = wider(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for row, column in _plain_blocks(q.shape[2], k.shape[2], causal):
        scores = _plain_scores(q, k, row, column, causal)
        found = scores.softmax(-1) @ v[:, :, column].to(dtype)
        merge(out[:, :, row], lse[:, :, row], found, scores.logsumexp(-1))
    return out.to(q.dtype), lse


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, scale = wider(q.dtype), q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dout, q_, k_, v_ = (x.to(dtype) for x in (dout, q, k, v))
    delta = (dout * out.to(dtype)).sum(-1, keepdim=True)
    for row, column in _plain_blocks(q.shape[2], k.shape[2], causal):
        p = (_plain_scores(q, k, row, column, causal) - lse[:, :, row, None]).exp_()
        dv[:, :, column] += p.mT @ dout[:, :, row]
        ds = p.mul_(dout[:, :, row] @ v_[:, :, column].mT - delta[:, :, row]).mul_(scale)
        dq[:, :, row] += ds @ k_[:, :, column]
        dk[:, :, column] += ds.mT @ q_[:, :, row]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


PLAIN = Kernel(_plain_forward, _plain_backward)
CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel(_flash_forward, _flash_backward)
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward)


def kernel_for(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel:
    """The fastest kernel that takes these tensors (folded, equal heads)."""
    if q.device.type == "cpu":
        return CPU_FLASH if hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu") else PLAIN
    if q.device.type == "cuda":
        asked = cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
        # Flash takes heads of a multiple of 8 channels only; torch.nn.functional would pad them before it asks.
        if q.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(asked):
            return CUDA_FLASH
        if cuda.can_use_efficient_attention(asked):
            return CUDA_EFFICIENT
    return PLAIN


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make output and lse over some keys, in place, those over more keys; lse of -inf marks that none was seen so far.

    Shapes: out and more [..., S, H], lse and more_lse [..., S]; out and lse in the wider of float32 and the dtype.
    """
    both = torch.logaddexp(lse, more_lse)
    seen = both > -torch.inf
    old, new = (torch.where(seen, part - both, -torch.inf).exp_().unsqueeze(-1) for part in (lse, more_lse))
    out.mul_(old).addcmul_(more.to(out.dtype), new)
    lse.copy_(both)


class Attended:
    """The attention of a rank's queries over blocks of keys that come one after the other, its own block, causally, first."""

    def __init__(self, q_SBnH: Tensor, kv_heads: int) -> None:
        self.shape, self.dtype, self.q = q_SBnH.shape, q_SBnH.dtype, fold(q_SBnH, kv_heads)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, block: Tensor, tile: Tile) -> None:
        """Take a block of keys in. Shapes: k and v as [2, S, B, k, H]."""
        q = self.q[:, :, tile.rows]
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in _folded(block, tile))
        out, lse = kernel_for(q, k, v, tile.causal).forward(q, k, v, tile.causal)
        if self.out is None or self.lse is None:
            assert tile.rows == slice(0, self.q.shape[2]), "the first block is seen by every query"
            self.out, self.lse = out, lse
            return
        self.out = self.out.to(wider(self.dtype))
        merge(self.out[:, :, tile.rows], self.lse[:, :, tile.rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and lse over all blocks.

        Shapes: [S, B, n, H] in the queries' dtype, [B k, g, S].
        """
        assert self.out is not None, "no block came"
        assert self.lse is not None, "an output has its lse"
        return self.out.to(self.dtype).permute(2, 0, 1, 3).reshape(self.shape), self.lse


class Gradients:
    """The backward of ``Attended``, block by block in any order; ``dq`` is complete when every block was here."""

    def __init__(self, dout_SBnH: Tensor, q_SBnH: Tensor, out_SBnH: Tensor, lse: Tensor, kv_heads: int) -> None:
        self.dout, self.q, self.out = (fold(x.contiguous(), kv_heads) for x in (dout_SBnH, q_SBnH, out_SBnH))
        self.lse = lse
        self.dq_SBnH = torch.zeros(q_SBnH.shape, dtype=wider(q_SBnH.dtype), device=q_SBnH.device)
        self.dq = fold(self.dq_SBnH, kv_heads)

    def add(self, block: Tensor, tile: Tile, into: Tensor) -> None:
        """Take a block in: its share of dq, and what its dk and dv gain, added to ``into``.

        The query heads of a kv head come one after the other, so that their gradients are never held side by side.
        Shapes: block [2, S, B, k, H], k and v; into the same, dk and dv, in the wider of float32 and the dtype.
        """
        dk_dv, (k, v) = _folded(into, tile), _folded(block, tile)
        rows = tile.rows
        for g in range(self.q.shape[1]):
            dout, q, out, dq = (x[:, g : g + 1, rows] for x in (self.dout, self.q, self.out, self.dq))
            lse = self.lse[:, g : g + 1, rows]
            backward = kernel_for(q, k, v, tile.causal).backward
            _accumulate((dq, *dk_dv), backward(dout, q, k, v, out, lse, tile.causal))

    def results(self, dk_dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in the run's dtype. Shapes: dk and dv as [2, S, B, k, H] -> [S, B, n, H], [S, B, k, H] twice."""
        dk, dv = dk_dv.to(self.q.dtype).unbind(0)
        return self.dq_SBnH.to(self.q.dtype), dk, dv


def _accumulate(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Add parts that nobody keeps: they are gone before the next are computed."""
    for total, part in zip(totals, parts, strict=True):
        total.add_(part)


def _folded(block: Tensor, tile: Tile) -> list[Tensor]:
    return [fold(x[tile.keys], x.shape[2]) for x in block.unbind(0)]


def zeros_for(block: Tensor) -> Tensor:
    """Room for the gradients of a block's k and v, in the wider of float32 and the dtype."""
    return torch.zeros(block.shape, dtype=wider(block.dtype), device=block.device)


class CausalAttention(Function):
    """Causal attention over keys that are all here; keeps q, k, v, the output and one lse a query and head."""

    @staticmethod
    def forward(ctx: Any, q_SBnH: Tensor, k_SBkH: Tensor, v_SBkH: Tensor) -> Tensor:
        attended, block = Attended(q_SBnH, k_SBkH.shape[2]), torch.stack((k_SBkH, v_SBkH))
        attended.add(block, own_tile(q_SBnH.shape[0]))
        out_SBnH, lse = attended.result()
        ctx.save_for_backward(q_SBnH, block, out_SBnH, lse)
        return out_SBnH

    @staticmethod
    def backward(ctx: Any, dout_SBnH: Tensor) -> tuple[Tensor, ...]:
        q_SBnH, block, out_SBnH, lse = ctx.saved_tensors
        gradients, own = Gradients(dout_SBnH, q_SBnH, out_SBnH, lse, block.shape[3]), zeros_for(block)
        gradients.add(block, own_tile(q_SBnH.shape[0]), own)
        return gradients.results(own)


def causal(q_SBnH: Tensor, k_SBkH: Tensor, v_SBkH: Tensor) -> Tensor:
    """Causal attention over keys that are all here; each kv head serves n / k query heads.

    Shapes: [S, B, n, H], [S, B, k, H] twice -> [S, B, n, H].
    """
    return cast(Tensor, CausalAttention.apply(q_SBnH, k_SBkH, v_SBkH))
