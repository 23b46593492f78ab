"""MiniMind, once, for every mesh: ``Model(config, Mesh())`` in a plain interpreter is the dense model.

Shape letters (capital is whole, small is this rank's): B batch, S sequence, c = S / cp, s = c / tp under SP and c otherwise, D
hidden, F / f feed-forward, N / n query heads, K / k kv heads, H head width, V / v vocab. The sequence comes first. Parameter names
are those Hugging Face uses for Qwen3.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind_tron.collectives import all_gather, gather_copies, sum_out
from minimind_tron.config import ModelConfig
from minimind_tron.layout import Cut, Layout, Storage, live, parameter, wider
from minimind_tron.mesh import Axis, Mesh
from minimind_tron.parallel import context, overlap, ring, sequence, tensor, vocab
from minimind_tron.parallel.attention import check_mask
from minimind_tron.parallel.context import SequenceMap
from minimind_tron.parallel.linear import ColumnLinear, Linear, RowLinear, Seams, WholeLinear, look_up, multiply
from minimind_tron.parallel.pipeline import Chunk, cut_layers
from minimind_tron.parallel.schedules import placement_of
from minimind_tron.parallel.vocab import IGNORED, check_ids, check_shape, wide
from minimind_tron.topology import PipelineConfig, StrategyConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def choose_seams(mesh: Mesh, strategy: StrategyConfig) -> Seams:
    """The region seams that the switches ask for."""
    tp, hidden = mesh.tp, strategy.async_communication
    enter: Callable[..., tuple[Tensor, ...]]
    if not strategy.sequence_parallel:
        enter = overlap.columns_hidden if hidden else tensor.columns
        return Seams(tp, enter, tensor.leave, tensor.own, tensor.total, (), 1)
    if strategy.sp_recompute:
        enter = overlap.sequence_columns_hidden_regathered if hidden else overlap.sequence_columns_regathered
    else:
        enter = overlap.sequence_columns_hidden if hidden else sequence.columns
    return Seams(tp, enter, sequence.leave, sequence.own, sequence.total, live(tp), tp.size)


def choose_attention(sequence: SequenceMap, strategy: StrategyConfig) -> Attend:
    """The way in which this rank's queries meet the keys of all ranks of cp.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H]; each kv head serves n / k query heads.
    """
    gathered = context.attend_regathered if strategy.cp_regather else context.attend_gathered
    ways = {"all_gather": gathered, "a2a": context.attend_by_heads, "ring": ring.attend}
    return partial(ways[strategy.cp_comm_type], sequence=sequence)


class RMSNorm(nn.Module):
    """x / root mean square of x, times a weight; the division runs in the wider of float32 and x's dtype.

    ``parts`` are the axes whose ranks normalise different tokens or heads with this weight.
    """

    def __init__(self, size: int, eps: float, parts: tuple[Axis, ...], storage: Storage) -> None:
        super().__init__()
        self.weight = parameter(Layout((size,), "ones", partial=parts), storage)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(wide(x), (x.shape[-1],), eps=self.eps).to(x.dtype)


def rotary_angles(positions_S: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and channel pair; angles in the wider of float32 and the dtype.

    Shapes: positions [S] -> two of [S, 1, 1, H], both halves of H alike.
    """
    angle_dtype = wider(dtype)
    channels = torch.arange(0, width, 2, dtype=angle_dtype, device=positions_S.device)
    angles = torch.outer(positions_S.to(angle_dtype), 1.0 / theta ** (channels / width))
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_SBnH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + H/2) by the angles of their positions."""
    first, second = x_SBnH.chunk(2, -1)
    return x_SBnH * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Grouped-query attention with per-head q/k norms before rotary positions; heads are cut over tp, tokens over cp."""

    def __init__(self, config: ModelConfig, seams: Seams, attend: Attend, storage: Storage) -> None:
        super().__init__()
        D, H, axis = config.hidden_size, config.head_width, seams.axis
        column = partial(ColumnLinear, bias=config.attention_bias, storage=storage)
        row = partial(RowLinear, bias=config.attention_bias, storage=storage)
        kv_parts = tensor.kv_parts(config, axis)
        self.q_proj = column(D, config.num_attention_heads * H, axis)
        self.k_proj = column(D, config.num_key_value_heads * H, axis, parts=kv_parts)
        self.v_proj = column(D, config.num_key_value_heads * H, axis, parts=kv_parts)
        self.o_proj = row(config.num_attention_heads * H, D, axis, outside=seams.outside)
        # Each rank normalises its own heads only, so these gradients are parts under TP as well as under SP.
        self.q_norm = RMSNorm(H, config.rms_norm_eps, live(axis), storage)
        self.k_norm = RMSNorm(H, config.rms_norm_eps, live(axis), storage)
        self.seams, self.attend, self.head_width = seams, attend, H

    def forward(self, x_sBD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = self.seams.columns(x_sBD, (self.q_proj, self.k_proj, self.v_proj), self.seams.axis)
        q_cBnH, k_cBkH, v_cBkH = (y.unflatten(-1, (-1, self.head_width)) for y in projected)
        q_cBnH = rotate(self.q_norm(q_cBnH), cos, sin)
        k_cBkH = rotate(self.k_norm(k_cBkH), cos, sin)
        return self.seams.row(self.attend(q_cBnH, k_cBkH, v_cBkH).flatten(-2), self.o_proj)


class FeedForward(nn.Module):
    """SwiGLU; its width is cut over tp."""

    def __init__(self, config: ModelConfig, seams: Seams, storage: Storage) -> None:
        super().__init__()
        D, width, axis = config.hidden_size, config.ffn_size, seams.axis
        self.gate_proj = ColumnLinear(D, width, axis, storage=storage)
        self.up_proj = ColumnLinear(D, width, axis, storage=storage)
        self.down_proj = RowLinear(width, D, axis, outside=seams.outside, storage=storage)
        self.seams = seams

    def forward(self, x_sBD: Tensor) -> Tensor:
        gate_cBf, up_cBf = self.seams.columns(x_sBD, (self.gate_proj, self.up_proj), self.seams.axis)
        return self.seams.row(F.silu(gate_cBf) * up_cBf, self.down_proj)


class Block(nn.Module):
    """A decoder block: attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, seams: Seams, attend: Attend, storage: Storage) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, seams.outside, storage)
        self.self_attn = Attention(config, seams, attend, storage)
        self.post_attention_layernorm = RMSNorm(D, eps, seams.outside, storage)
        self.mlp = FeedForward(config, seams, storage)

    def forward(self, x_sBD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_sBD = x_sBD + self.self_attn(self.input_layernorm(x_sBD), cos, sin)
        return x_sBD + self.mlp(self.post_attention_layernorm(x_sBD))


class WholeVocab:
    """Embedding and loss with the whole vocab on every rank; under SP each rank embeds and judges its own tokens only."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        self.vocab_size, self.seams = config.vocab_size, seams

    def linear(self, config: ModelConfig, storage: Storage, tied: tuple[Axis, ...] = ()) -> Linear:
        """The module that holds the embedding or the head; ``tied`` are the axes over which it is both."""
        return WholeLinear(config.hidden_size, config.vocab_size, outside=self.seams.outside, storage=storage, tied=tied)

    def embed(self, ids_SB: Tensor, embedding: Linear) -> Tensor:
        """Hidden states of ids. Shapes: [S, B] -> [s, B, D]."""
        return look_up(self.seams.own(ids_SB, self.seams.axis), embedding.weight)

    def loss(self, x_sBD: Tensor, labels_SB: Tensor, head: Linear) -> Tensor:
        """The sum of cross entropy over valid labels, the same on every rank. Shapes: [s, B, D], [S, B] -> scalar."""
        logits_sBV = wide(multiply(x_sBD, head.weight))
        labels_sB = self.seams.own(labels_SB, self.seams.axis)
        own = F.cross_entropy(logits_sBV.flatten(0, 1), labels_sB.flatten(), ignore_index=IGNORED, reduction="sum")
        return self.seams.total(own, self.seams.axis)

    def logits(self, x_sBD: Tensor, head: Linear) -> Tensor:
        """The whole logits on every rank. Shapes: [s, B, D] -> [S, B, V]."""
        logits_sBV = multiply(x_sBD, head.weight)
        return all_gather(logits_sBV, self.seams.axis) if self.seams.multiple > 1 else logits_sBV


class CutVocab:
    """Embedding and loss with the vocab cut over tp."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        self.vocab_size, self.seams = config.vocab_size, seams
        self.cut = Cut(0, seams.axis, seams.axis.size)

    def linear(self, config: ModelConfig, storage: Storage, tied: tuple[Axis, ...] = ()) -> Linear:
        """The module that holds the embedding or the head; ``tied`` are the axes over which it is both."""
        return ColumnLinear(config.hidden_size, config.vocab_size, self.seams.axis, storage=storage, tied=tied)

    def embed(self, ids_SB: Tensor, embedding: Linear) -> Tensor:
        """Hidden states of ids. Shapes: [S, B] -> [s, B, D]."""
        share_SBD = vocab.look_up(ids_SB, embedding.weight, self.cut, self.vocab_size)
        return self.seams.leave(share_SBD, self.seams.axis)

    def loss(self, x_sBD: Tensor, labels_SB: Tensor, head: Linear) -> Tensor:
        """The sum of cross entropy over valid labels, the same on every rank. Shapes: [s, B, D], [S, B] -> scalar."""
        (logits_SBv,) = self.seams.columns(x_sBD, (head,), self.seams.axis)
        return vocab.cross_entropy(logits_SBv, labels_SB, self.cut, self.vocab_size)

    def logits(self, x_sBD: Tensor, head: Linear) -> Tensor:
        """The whole logits on every rank. Shapes: [s, B, D] -> [S, B, V]."""
        (logits_SBv,) = self.seams.columns(x_sBD, (head,), self.seams.axis)
        logits_vSB = all_gather(logits_SBv.movedim(-1, 0), self.seams.axis)
        return logits_vSB[: self.vocab_size].movedim(0, -1)


class Decoder(nn.Module):
    """Embedding, blocks and final norm, under Hugging Face's name ``model``; what other stages hold is None.

    Blocks are keyed by their global number.
    """

    def __init__(
        self, config: ModelConfig, seams: Seams, attend: Attend, chunks: list[Chunk], embedding: Linear | None, storage: Storage
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        numbers = [number for chunk in chunks for number in chunk.layers]
        self.layers = nn.ModuleDict({str(i): Block(config, seams, attend, storage) for i in numbers})
        last = any(chunk.last for chunk in chunks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, seams.outside, storage) if last else None


class Model(nn.Module):
    """MiniMind on a mesh, as far as this rank holds it; values are undefined until ``initialise`` or ``interop`` fills them."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        strategy: StrategyConfig | None = None,
        pipeline: PipelineConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.strategy = config, mesh or Mesh(), strategy or StrategyConfig()
        storage = Storage(dtype, torch.device(device), live(self.mesh.cp))
        self.pipeline = pipeline or PipelineConfig()
        self.seams = choose_seams(self.mesh, self.strategy)
        self.sequence = SequenceMap(self.mesh.cp, self.strategy.sequence_layout)
        attend = choose_attention(self.sequence, self.strategy)
        self.vocab: WholeVocab | CutVocab = (CutVocab if self.strategy.vocab_parallel else WholeVocab)(config, self.seams)
        pp = self.mesh.pp
        placement = placement_of(self.pipeline.pp_schedule, pp.size, self.pipeline.chunks_a_stage)
        chunks = cut_layers(config, self.pipeline, pp.size)
        self.chunks = {number: chunks[number] for number in placement.chunks_of(pp.rank)}
        first, last = 0 in self.chunks, placement.chunks - 1 in self.chunks
        # On two stages, each copy of a tied matrix gets one half of its gradient: as a table on the first, as the head on the last.
        tied = live(self.mesh.ends) if config.tie_word_embeddings and first != last else ()
        holds_table = first or (last and config.tie_word_embeddings)
        embedding = self.vocab.linear(config, storage, tied) if holds_table else None
        self.model = Decoder(config, self.seams, attend, list(self.chunks.values()), embedding, storage)
        self.lm_head = self.vocab.linear(config, storage) if last and not config.tie_word_embeddings else None
        self.storage = storage

    @property
    def head(self) -> Linear:
        """The module that holds the head's weight: the embedding when they are tied.

        Raises: AssertionError on a stage without the last chunk.
        """
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last chunk is on another stage"
        return head

    def padded(self, x_SB: Tensor, value: int) -> Tensor:
        """Pad the sequence to what CP and SP can cut: at its end, where causal attention keeps it from every real token."""
        missing = -x_SB.shape[0] % self.sequence.multiple(self.seams.multiple)
        return F.pad(x_SB, (0, 0, 0, missing), value=value)

    def own(self, x_SB: Tensor, padding: int) -> Tensor:
        """This rank's tokens over cp of ids or labels. Shapes: [S, B] -> [c, B]."""
        return self.sequence.own(self.padded(x_SB, padding))

    def hidden_shape(self, ids_SB: Tensor) -> tuple[int, int, int]:
        """The shape [s, B, D] of the hidden states between chunks."""
        whole = self.padded(ids_SB, 0).shape[0]
        return whole // (self.sequence.axis.size * self.seams.multiple), ids_SB.shape[1], self.config.hidden_size

    def run_chunk(self, number: int, x_sBD: Tensor | None, ids_SB: Tensor) -> Tensor:
        """The hidden states after a chunk that this rank holds, normalised after the last one.

        Shapes: [s, B, D], None for the first chunk, and ids [S, B] -> [s, B, D].
        """
        chunk, ids_cB = self.chunks[number], self.own(ids_SB, 0)
        # A token's position is the one in the whole sample, wherever the token is.
        positions_c = self.sequence.own(torch.arange(self.sequence.axis.size * ids_cB.shape[0], device=ids_SB.device))
        cos, sin = rotary_angles(positions_c, self.config.head_width, self.config.rope_theta, self.storage.dtype)
        if chunk.first:
            assert self.model.embed_tokens is not None
            x_sBD = self.vocab.embed(ids_cB, self.model.embed_tokens)
        for layer in chunk.layers:
            x_sBD = self.model.layers[str(layer)](x_sBD, cos, sin)
        if chunk.last:
            assert self.model.norm is not None
            x_sBD = self.model.norm(x_sBD)
        assert x_sBD is not None, f"chunk {number} was given nothing"
        return x_sBD

    def loss(self, x_sBD: Tensor, labels_SB: Tensor) -> Tensor:
        """The sum of cross entropy over this rank's valid labels over cp, from the last chunk's hidden states; added up over cp,
        it is that of the batch. The same on every rank of tp.

        Shapes: [s, B, D], labels [S, B] -> scalar, in the wider of float32 and the dtype.
        """
        return self.vocab.loss(x_sBD, self.own(labels_SB, IGNORED), self.head)

    def whole_logits(self, x_sBD: Tensor, seq_len: int) -> Tensor:
        """The logits of all tokens on every rank, from the last chunk's hidden states; training never gathers them.

        Shapes: [s, B, D] -> [S, B, V]. Cost: all-gathers over tp and cp.
        """
        logits_cBV = self.vocab.logits(x_sBD, self.head)
        return self.sequence.join(gather_copies(logits_cBV, self.sequence.axis))[:seq_len]

    def _through(self, ids_SB: Tensor) -> Tensor:
        assert self.mesh.pp.size == 1, "one stage has not the whole model; step.py runs pipelines"
        x_sBD = None
        for number in self.chunks:
            x_sBD = self.run_chunk(number, x_sBD, ids_SB)
        assert x_sBD is not None
        return x_sBD

    def forward(self, ids_SB: Tensor, labels_SB: Tensor, mask_SB: Tensor | None = None) -> Tensor:
        """The sum of cross entropy over the valid labels of a batch, the same on every rank; one stage holds the whole model.

        Shapes: ids and labels (shifted already, -100 counts nowhere) [S, B], mask likewise (True: a token that may be seen) ->
        scalar, in the wider of float32 and the dtype.
        Raises: TronError for ids of another shape or without a token, for an id or a label outside of the vocab (on a GPU: whoever
        moves the batch there checks it), and for a mask that is more than padding at the end.
        """
        check_shape(ids_SB, labels_SB)
        check_mask(mask_SB, ids_SB)
        if not ids_SB.is_cuda:
            check_ids(ids_SB, labels_SB, self.config.vocab_size)
        return sum_out(self.loss(self._through(ids_SB), labels_SB), self.sequence.axis)

    @torch.no_grad()
    def logits(self, ids_SB: Tensor, mask_SB: Tensor | None = None) -> Tensor:
        """The whole logits, where one stage holds the whole model, for checks and sampling; training never gathers them.

        Shapes: ids and mask [S, B] -> [S, B, V]. Raises: TronError as ``forward`` does.
        """
        check_shape(ids_SB)
        check_mask(mask_SB, ids_SB)
        check_ids(ids_SB, None, self.config.vocab_size)
        return self.whole_logits(self._through(ids_SB), ids_SB.shape[0])
