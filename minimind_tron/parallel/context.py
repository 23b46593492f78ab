"""Context parallelism (CP): one long sequence is cut over ranks, and each query still sees every key before it.

Outside of attention nothing is sent: tokens do not know of each other there. Every weight sees only this rank's tokens, so every
gradient is a part over cp. Inside there are three ways to bring queries and keys together; two are here, the third is ``ring.py``:

- *all-gather*: every rank gets all K and V, queries stay;
- *all-to-all*: every rank gets all tokens of some heads, and gives the results back;
- *ring*: blocks of K and V go round, queries stay.

``SequenceMap`` says which tokens a rank holds. Causally, later tokens have more to do: with contiguous pieces the last rank does
2 cp - 1 times the work of the first. In zigzag, rank r holds chunks r and 2 cp - 1 - r of 2 cp, and all ranks do the same. By
all-to-all every rank sees all tokens of its heads, and the map does not matter.

Cost, per layer and microbatch, in elements that a rank sends; c = S / cp, n and k are this rank's query and kv heads, k' is
lcm(k, cp), and what is marked * travels in float32 or wider:

| | forward | backward |
| --- | --- | --- |
| all-gather | (cp-1) 2cBkH | (cp-1) 2cBkH again, unless kept, and (cp-1) 2cBkH* |
| all-to-all | (cp-1)/cp cB(2n + 2k')H | the same |
| ring | (cp-1) 2cBkH | (cp-1) 2cBkH and (cp-1) 2cBkH* |

Source: all-gather as in Llama 3, arXiv 2407.21783, section 3.3.2 (zigzag comes from there, too; here its gather hides behind the
rank's own block); all-to-all from DeepSpeed-Ulysses, arXiv 2309.14509. There kv heads must divide; here they are repeated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from minimind_tron.collectives import Pending, all_to_all, reduce_scatter, start_all_gather
from minimind_tron.mesh import Axis
from minimind_tron.parallel.attention import Attended, Gradients, Tile, causal, own_tile, zeros_for
from minimind_tron.topology import SequenceLayout


@dataclass(frozen=True)
class SequenceMap:
    """Which tokens of a sequence each rank of an axis holds; ids, labels, positions and results all go through this map.

    A sequence is cut into equal chunks, and a rank holds one of them (contiguous) or two (zigzag), in ascending order.
    """

    axis: Axis
    layout: SequenceLayout = "contiguous"

    @property
    def zigzag(self) -> bool:
        """Whether a rank holds a chunk from both ends; alone it would hold two neighbours, which are one piece."""
        return self.layout == "zigzag" and self.axis.size > 1

    @property
    def chunks_a_rank(self) -> int:
        """Chunks that a rank holds."""
        return 2 if self.zigzag else 1

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks, ascending."""
        return (rank, 2 * self.axis.size - 1 - rank) if self.zigzag else (rank,)

    def multiple(self, parts: int) -> int:
        """What a sequence is padded to, so that each rank's share can be cut once more, into ``parts``."""
        return self.axis.size * math.lcm(self.chunks_a_rank, parts)

    def own(self, x_S: Tensor) -> Tensor:
        """This rank's tokens of a whole, padded sequence.

        Shapes: [S, ...] -> [c, ...].
        """
        return self._of(x_S, self.axis.rank)

    def _of(self, x_S: Tensor, rank: int) -> Tensor:
        chunks = x_S.chunk(self.axis.size * self.chunks_a_rank)
        return torch.cat([chunks[number] for number in self.chunks_of(rank)])

    def cut(self, x_S: Tensor) -> Tensor:
        """The tokens of every rank. Shapes: [S, ...] -> [cp, c, ...]."""
        return torch.stack([self._of(x_S, rank) for rank in range(self.axis.size)])

    def join(self, parts: Sequence[Tensor] | Tensor) -> Tensor:
        """The whole sequence from every rank's tokens, in the order of the ranks. Shapes: cp times [c, ...] -> [S, ...]."""
        found: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            found |= zip(self.chunks_of(rank), part.chunk(self.chunks_a_rank), strict=True)
        return torch.cat([found[number] for number in sorted(found)])

    def tile(self, source: int, tokens: int) -> Tile | None:
        """What this rank's queries see of a rank's keys, None where they see nothing; every rank holds so many tokens.

        Each of another rank's chunks is wholly before or wholly after each of this rank's, so what is seen is one rectangle.
        """
        every, half = slice(0, tokens), tokens // 2
        if source == self.axis.rank:
            return own_tile(tokens)
        if source < self.axis.rank:
            return Tile(every, slice(0, half) if self.zigzag else every)
        return Tile(slice(half, tokens), every) if self.zigzag else None

    def other_tiles(self, tokens: int) -> Iterator[tuple[int, Tile]]:
        """The other ranks of whose keys this rank's queries see any, with what they see."""
        for source in range(self.axis.size):
            if source != self.axis.rank and (tile := self.tile(source, tokens)):
                yield source, tile


def _forward(ctx: Any, q: Tensor, own: Tensor, sequence: SequenceMap) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and the gathered blocks; while these are under way, the rank computes with its own."""
    ctx.sequence, attended = sequence, Attended(q, own.shape[3])
    gathering = start_all_gather(own, sequence.axis)
    attended.add(own, own_tile(q.shape[0]))
    gathered = gathering.wait().view(sequence.axis.size, *own.shape)
    for source, tile in sequence.other_tiles(q.shape[0]):
        attended.add(gathered[source], tile)
    return *attended.result(), gathered


def _backward(ctx: Any, dout: Tensor, own: Tensor, gathering: Pending) -> tuple[Tensor | None, ...]:
    """What the keys of every rank get from this rank's queries, and of that the sum for its own keys."""
    q, _, out, lse = ctx.saved_tensors
    sequence, axis = ctx.sequence, ctx.sequence.axis
    gradients, into = Gradients(dout, q, out, lse, own.shape[3]), zeros_for(own.expand(axis.size, *own.shape))
    gradients.add(own, own_tile(q.shape[0]), into[axis.rank])
    gathered = gathering.wait().view(into.shape)
    for source, tile in sequence.other_tiles(q.shape[0]):
        gradients.add(gathered[source], tile, into[source])
    return (*gradients.results(reduce_scatter(into, axis).view(own.shape)), None)


class GatheredAttention(Function):
    """All-gather K and V, and keep those of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceMap) -> Tensor:
        out, lse, gathered = _forward(ctx, q, torch.stack((k, v)), sequence)
        ctx.save_for_backward(q, gathered, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.saved_tensors[1]
        return _backward(ctx, dout, gathered[ctx.sequence.axis.rank], Pending(lambda: gathered))


class RegatheredAttention(Function):
    """All-gather K and V; keep this rank's own and gather again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceMap) -> Tensor:
        own = torch.stack((k, v))
        out, lse, _ = _forward(ctx, q, own, sequence)
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.saved_tensors[1]
        return _backward(ctx, dout, own, start_all_gather(own, ctx.sequence.axis))


def attend_gathered(q_cBnH: Tensor, k_cBkH: Tensor, v_cBkH: Tensor, sequence: SequenceMap) -> Tensor:
    """Causal attention of this rank's queries, K and V all-gathered and kept.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H].
    Cost: an all-gather of 2*S*B*k*H forward, a reduce-scatter of the same in float32 or wider backward. Keeps c tokens of q and
    the output, S of k and v.
    """
    return cast(Tensor, GatheredAttention.apply(q_cBnH, k_cBkH, v_cBkH, sequence))


def attend_regathered(q_cBnH: Tensor, k_cBkH: Tensor, v_cBkH: Tensor, sequence: SequenceMap) -> Tensor:
    """Causal attention of this rank's queries, K and V all-gathered, and again in the backward.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H].
    Cost: that of ``attend_gathered``, and a second all-gather backward. Keeps c tokens of q, k, v and the output.
    """
    return cast(Tensor, RegatheredAttention.apply(q_cBnH, k_cBkH, v_cBkH, sequence))


def repeats(kv_heads: int, ranks: int) -> int:
    """How often each kv head is repeated so that ranks can share them out; the query heads that use it are shared out alike."""
    return math.lcm(kv_heads, ranks) // kv_heads


def attend_by_heads(q_cBnH: Tensor, k_cBkH: Tensor, v_cBkH: Tensor, sequence: SequenceMap) -> Tensor:
    """Causal attention by all-to-all: all tokens of n / cp heads, and back.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H].
    Cost: an all-to-all of c*B*(n + 2k')*H and one of c*B*n*H, forward and backward each; k' = lcm(k, cp).
    Raises: AssertionError unless cp divides n; config refuses that first.
    """
    axis, count = sequence.axis, repeats(k_cBkH.shape[2], sequence.axis.size)
    assert q_cBnH.shape[2] % axis.size == 0, f"{q_cBnH.shape[2]} query heads over {axis.size} ranks"
    # The gradient of a repeated head is the sum over its copies: each rank's queries use it for themselves.
    every = (q_cBnH, *(x.repeat_interleave(count, 2) for x in (k_cBkH, v_cBkH)))
    by_rank = [x.unflatten(2, (axis.size, -1)).movedim(2, 0) for x in every]
    whole = sequence.join(all_to_all(torch.cat(by_rank, 3), axis))
    out_SBhH = causal(*whole.split([x.shape[3] for x in by_rank], 2))
    return all_to_all(sequence.cut(out_SBhH), axis).movedim(0, 2).flatten(2, 3)
