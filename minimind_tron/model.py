"""MiniMind, once, for every mesh: ``Model(config, Mesh())`` in a plain interpreter is the dense model.

Shape letters (capital is whole, small is this rank's): B batch, S sequence, c = S / cp, s = c / tp under SP and c otherwise, D
hidden, F / f feed-forward, N / n query heads, K / k kv heads, H head width, V / v vocab. The sequence comes first. Parameter names
are those Hugging Face uses for Qwen3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind_tron.collectives import all_gather, gather_copies, sum_out
from minimind_tron.config import ModelConfig
from minimind_tron.cut_config import CutConfig
from minimind_tron.dropout import Noise, Tokens, drop
from minimind_tron.errors import TronError
from minimind_tron.layers import Attend, Block, RMSNorm, rotary_angles
from minimind_tron.layout import Cut, LaidOut, Storage, draw, layout_of, live
from minimind_tron.mesh import Axis, Mesh
from minimind_tron.parallel import context, overlap, ring, sequence, tensor, vocab
from minimind_tron.parallel.attention import check_mask
from minimind_tron.parallel.context import SequenceMap
from minimind_tron.parallel.linear import ColumnLinear, Linear, Seams, WholeLinear, look_up, multiply
from minimind_tron.parallel.pipeline import Chunk, cut_layers
from minimind_tron.parallel.schedules import placement_of
from minimind_tron.parallel.segments import AnyVisit, Segment, Visit, VisitAgain, VisitKept
from minimind_tron.parallel.vocab import IGNORED, check_ids, check_shape, wide
from minimind_tron.parallel.zero import STAGES
from minimind_tron.topology import PipelineConfig, Recompute, StrategyConfig

# What a block keeps of a microbatch until its backward.
VISITS: dict[Recompute, type[AnyVisit]] = {"none": Visit, "block": VisitAgain, "selective": VisitKept}


def choose_seams(mesh: Mesh, strategy: StrategyConfig) -> Seams:
    """The region seams that the switches ask for."""
    tp, hidden = mesh.tp, strategy.async_communication
    enter: Callable[..., tuple[Tensor, ...]]
    if not strategy.sequence_parallel:
        enter = overlap.columns_hidden if hidden else tensor.columns
        return Seams(tp, enter, tensor.leave, tensor.rows, tensor.own, tensor.total, (), 1)
    if strategy.sp_recompute:
        enter = overlap.sequence_columns_hidden_regathered if hidden else overlap.sequence_columns_regathered
    else:
        enter = overlap.sequence_columns_hidden if hidden else sequence.columns
    return Seams(tp, enter, sequence.leave, sequence.rows, sequence.own, sequence.total, live(tp), tp.size)


def choose_attention(sequence: SequenceMap, strategy: StrategyConfig) -> Attend:
    """The way in which this rank's queries meet the keys of all ranks of cp.

    Shapes: [c, B, n, H], [c, B, k, H] twice -> [c, B, n, H]; each kv head serves n / k query heads.
    """
    gathered = context.attend_regathered if strategy.cp_regather else context.attend_gathered
    ways = {"all_gather": gathered, "a2a": context.attend_by_heads, "ring": ring.attend}
    return partial(ways[strategy.cp_comm_type], sequence=sequence)


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


def _weights(module: nn.Module) -> list[LaidOut]:
    return cast(list[LaidOut], list(module.parameters()))


class Piece(NamedTuple):
    """A microbatch: ids and labels [S, B], and the number its first sample has in the global batch."""

    ids_SB: Tensor
    labels_SB: Tensor
    first: int = 0


# What is made of the final hidden states [s, B, D] and the labels [S, B].
Finish = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """What this rank needs to know of a microbatch: ids, rotary angles, whose elements may be dropped, what is made at the end."""

    piece: Piece
    ids_cB: Tensor
    cos: Tensor
    sin: Tensor
    tokens: Tokens
    noise: Noise | None
    finish: Finish


class Model(nn.Module):
    """MiniMind on a mesh, as far as this rank holds it; values are undefined until ``initialise`` or ``interop`` fills them.

    ``dtype`` is that of weights, activations and messages; with a ``master_dtype`` the optimizer updates masters of that dtype,
    kept beside the weights (mixed precision).
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        strategy: StrategyConfig | None = None,
        pipeline: PipelineConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.strategy = config, mesh or Mesh(), strategy or StrategyConfig()
        self.storage = Storage(dtype, torch.device(device), live(self.mesh.data), passing=self.strategy.zero == 3)
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
        embedding = self.vocab.linear(config, self.storage, tied) if holds_table else None
        self.model = Decoder(config, self.seams, attend, list(self.chunks.values()), embedding, self.storage)
        self.lm_head = self.vocab.linear(config, self.storage) if last and not config.tie_word_embeddings else None
        self.segments = {number: self._segments_of(chunk) for number, chunk in self.chunks.items()}
        named = {name: cast(LaidOut, weight) for name, weight in self.named_parameters()}
        every = [segment for segments in self.segments.values() for segment in segments]
        self.masters = STAGES[self.strategy.zero](named, every, self.mesh.data, master_dtype)

    @property
    def head(self) -> Linear:
        """The module that holds the head's weight: the embedding when they are tied.

        Raises: AssertionError on a stage without the last chunk.
        """
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last chunk is on another stage"
        return head

    def _segments_of(self, chunk: Chunk) -> list[Segment]:
        """A chunk's parts, in the order of the forward; see ``segments.py``."""
        found = []
        if chunk.first:
            assert self.model.embed_tokens is not None
            found.append(Segment("embedding", _weights(self.model.embed_tokens), self._embed, Visit))
        for number in chunk.layers:
            block = self.model.layers[str(number)]
            run = partial(self._block, number)
            found.append(Segment(f"block {number}", _weights(block), run, VISITS[self.strategy.recompute]))
        if chunk.last:
            assert self.model.norm is not None
            weights = _weights(self.model.norm) + _weights(self.head)
            found.append(Segment("head", weights, self._finish, Visit))
        return found

    def _embed(self, _: Tensor | None, view: View) -> Tensor:
        assert self.model.embed_tokens is not None
        x_sBD = self.vocab.embed(view.ids_cB, self.model.embed_tokens)
        return drop(x_sBD, view.noise, view.tokens, 0, "embedding")

    def _block(self, number: int, x_sBD: Tensor | None, view: View) -> Tensor:
        drops = partial(drop, noise=view.noise, tokens=view.tokens, layer=number, place="attention")
        return self.model.layers[str(number)](x_sBD, view.cos, view.sin, drops)

    def _finish(self, x_sBD: Tensor | None, view: View) -> Tensor:
        assert self.model.norm is not None
        return view.finish(self.model.norm(x_sBD), view.piece.labels_SB)

    def view(self, piece: Piece, finish: Finish, noise: Noise | None = None) -> View:
        """What this rank needs to know of a microbatch; with noise, elements are dropped."""
        ids_cB = self.own(piece.ids_SB, 0)
        # A token's position is the one in the whole sample, wherever the token is.
        positions_c = self.sequence.own(torch.arange(self.sequence.axis.size * ids_cB.shape[0], device=ids_cB.device))
        cos, sin = rotary_angles(positions_c, self.config.head_width, self.config.rope_theta, self.storage.dtype)
        positions_s = self.seams.own(positions_c, self.seams.axis)
        tokens = Tokens(positions_s.tolist(), range(piece.first, piece.first + ids_cB.shape[1])) if noise else NOWHERE
        return View(piece, ids_cB, cos, sin, tokens, noise, finish)

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

    def _through(self, piece: Piece, finish: Finish) -> Tensor:
        assert self.mesh.pp.size == 1, "one stage has not the whole model; step.py runs pipelines"
        x, view = None, self.view(piece, finish)
        segments = [segment for number in self.chunks for segment in self.segments[number]]
        for segment, then in zip(segments, [*segments[1:], None], strict=True):
            with self.masters.use(segment, then):
                x = segment.run(x, view)
        assert x is not None
        return x

    def forward(self, ids_SB: Tensor, labels_SB: Tensor, mask_SB: Tensor | None = None) -> Tensor:
        """The sum of cross entropy over the valid labels of a batch, the same on every rank of tp and cp, in one graph; one stage
        holds the whole model.

        Shapes: ids and labels (shifted already, -100 counts nowhere) [S, B], mask likewise (True: a token that may be seen) ->
        scalar, in the wider of float32 and the dtype.
        Raises: TronError for ids of another shape or without a token, for an id or a label outside of the vocab (on a GPU: whoever
        moves the batch there checks it), for a mask that is more than padding at the end, and under ZeRO 3 where there will be a
        backward: it would find the weights freed.
        """
        check_shape(ids_SB, labels_SB)
        check_mask(mask_SB, ids_SB)
        if not ids_SB.is_cuda:
            check_ids(ids_SB, labels_SB, self.config.vocab_size)
        if self.storage.passing and torch.is_grad_enabled():
            raise TronError(
                "a graph over all of the model was asked for under zero=3", "use step.compute_gradients, or torch.no_grad"
            )
        return sum_out(self._through(Piece(ids_SB, labels_SB), self.loss), self.sequence.axis)

    @torch.no_grad()
    def logits(self, ids_SB: Tensor, mask_SB: Tensor | None = None) -> Tensor:
        """The whole logits, where one stage holds the whole model, for checks and sampling; training never gathers them.

        Shapes: ids and mask [S, B] -> [S, B, V]. Raises: TronError as ``forward`` does.
        """
        check_shape(ids_SB)
        check_mask(mask_SB, ids_SB)
        check_ids(ids_SB, None, self.config.vocab_size)
        return self._through(Piece(ids_SB, ids_SB), lambda x_sBD, _: self.whole_logits(x_sBD, ids_SB.shape[0]))


# Without noise nobody asks which tokens are masked.
NOWHERE = Tokens((), ())


def initialise(model: Model, seed: int, spread: float = 0.0) -> None:
    """Fill every parameter by its name and the seed: the same weights on every mesh.

    Cost: each whole tensor is drawn on every rank, one at a time; nothing is sent.
    """
    for name, weight in model.named_parameters():
        layout = layout_of(weight)
        model.masters.fill(name, draw(name, layout, seed, spread)[layout.region])


def build_model(config: CutConfig, mesh: Mesh, device: torch.device) -> Model:
    """The model of a run, not filled yet."""
    master_dtype = getattr(torch, config.master_dtype) if config.master_dtype else None
    dtype = getattr(torch, config.compute_dtype)
    return Model(config.model, mesh, config.strategy, config.pipeline, dtype=dtype, master_dtype=master_dtype, device=device)
