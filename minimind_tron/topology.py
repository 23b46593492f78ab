"""How a run is cut over ranks: the mesh, who computes what, which layers are where; checked as ``config`` is."""

import math
from typing import Annotated, Literal, Self

import tyro
from pydantic import model_validator

from minimind_tron.config import Config, ModelConfig, divisors
from minimind_tron.errors import TronError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
SequenceLayout = Literal["contiguous", "zigzag"]
ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "block", "selective"]


class MeshConfig(Config):
    """How many ranks each axis has."""

    tp_size: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks that share every matrix (tensor parallelism)."""
    pp_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 1
    """Stages that the layers are cut into (pipeline parallelism)."""
    cp_size: Annotated[int, tyro.conf.arg(aliases=["--cp"])] = 1
    """Ranks that share every sequence (context parallelism)."""
    dp_size: Annotated[int, tyro.conf.arg(aliases=["--dp"])] = 1
    """Ranks that share the samples of every batch (data parallelism)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "tp_size", "pp_size", "cp_size", "dp_size")
        return self

    @property
    def degrees(self) -> dict[str, int]:
        """The size of every axis, outermost first."""
        return {"dp": self.dp_size, "pp": self.pp_size, "cp": self.cp_size, "tp": self.tp_size}

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.degrees.values())

    def check_world(self, world_size: int, model: ModelConfig | None = None) -> None:
        """Refuse a number of ranks other than the mesh has; with a model, the advice is one that the model can be cut by.

        Raises: TronError.
        """
        if world_size != self.world_size:
            degrees = " x ".join(f"{name} {size}" for name, size in self.degrees.items())
            tp, rest = divmod(world_size, self.dp_size * self.pp_size * self.cp_size)
            fits = not rest and (model is None or cuts(model, tp))
            raise TronError(
                f"the launcher started {_ranks(world_size)}, but the mesh {degrees} has {self.world_size}",
                f"use --tp-size {tp}, or start {_ranks(self.world_size)}" if fits else f"start {_ranks(self.world_size)}",
            )


class StrategyConfig(Config):
    """Switches that change who computes what, never what is computed."""

    sequence_parallel: bool = False
    """Cut the sequence over tp outside of attention and feed-forward."""
    sp_recompute: bool = True
    """With sequence parallelism: keep only the local shard for backward and gather it again."""
    vocab_parallel: bool = False
    """Cut embedding, head and cross entropy over tp."""
    async_communication: bool = False
    """Hide the collective of the input gradient behind the weight gradient."""
    cp_comm_type: Literal["all_gather", "a2a", "ring"] = "ring"
    """How queries meet keys of other ranks under context parallelism: keys gathered, heads exchanged, or keys going round."""
    cp_layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    """Which tokens a rank holds: one piece, or two from both ends for equal work; auto is zigzag, and contiguous for a2a."""
    cp_regather: bool = True
    """With --cp-comm-type all_gather: gather the keys again in the backward instead of keeping them."""
    zero: ZeroStage = 0
    """What is cut over the ranks of dp and cp: 1 optimizer states, 2 gradients too, 3 parameters too (ZeRO)."""
    recompute: Recompute = "none"
    """What a decoder block computes again in the backward instead of keeping it: all of it (block), or all but its matmuls
    (selective)."""

    @property
    def sequence_layout(self) -> SequenceLayout:
        """The layout of the sequence over cp; by all-to-all every rank has all tokens of its heads, and zigzag gains nothing."""
        if self.cp_layout != "auto":
            return self.cp_layout
        return "contiguous" if self.cp_comm_type == "a2a" else "zigzag"


def virtual_stages_of(schedule: ScheduleName, asked: int | None) -> int:
    """Chunks of the model that a schedule gives each stage.

    Raises: TronError for a number the schedule does not have.
    """
    usual = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    if asked is None or asked == usual or (schedule == "interleaved" and asked >= 1):
        return asked or usual
    fix = f"use --virtual-stages {usual}" + (", or --pp-schedule interleaved" if asked > 1 else "")
    raise TronError(f"virtual_stages={asked} was given, but {schedule} has {usual} a stage", fix)


class PipelineConfig(Config):
    """Which layers are where, and in what order microbatches go through them; never what is computed."""

    pp_schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards; with one stage, too."""
    virtual_stages: int | None = None
    """Chunks of the model on each stage: any number for interleaved (2 unless given), 2 for zb-v, 1 for the others."""
    pp_layout: str | None = None
    """Layers of every chunk, in the order of the model, such as 3,5,4,4; balanced by estimated cost unless given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "virtual_stages")
        virtual_stages_of(self.pp_schedule, self.virtual_stages)
        if self.pp_layout is not None and not all(part.strip().isdigit() for part in self.pp_layout.split(",")):
            raise TronError(
                f"pp_layout={self.pp_layout!r} was given, numbers of layers such as 3,5,4,4 are wanted", "change --pp-layout"
            )
        return self

    @property
    def chunks_a_stage(self) -> int:
        """Chunks of the model on each stage."""
        return virtual_stages_of(self.pp_schedule, self.virtual_stages)

    @property
    def layers(self) -> list[int] | None:
        """Layers of every chunk as given by hand."""
        return None if self.pp_layout is None else [int(part) for part in self.pp_layout.split(",")]


def check_depth(model: ModelConfig, stages: int, pipeline: PipelineConfig) -> None:
    """Refuse a model that cannot be cut into so many chunks, and a cut by hand that is not one.

    Raises: TronError.
    """
    layers, chunks, given = model.num_hidden_layers, stages * pipeline.chunks_a_stage, pipeline.layers
    pieces = f"pp={stages}" + (f" x virtual_stages={pipeline.chunks_a_stage}" if pipeline.chunks_a_stage > 1 else "")
    if chunks > layers:
        most = layers // pipeline.chunks_a_stage
        fix = f"use --pp-size {most}{' or fewer' * (most > 1)}" if most else f"use --num-hidden-layers {chunks} or more"
        raise TronError(f"num_hidden_layers={layers} cannot be cut over {pieces}: every chunk holds a layer", fix)
    if given is None:
        return
    if len(given) != chunks:
        raise TronError(f"pp_layout={pipeline.pp_layout} has {len(given)} parts, {pieces} has {chunks}", "change --pp-layout")
    if sum(given) != layers:
        raise TronError(f"pp_layout={pipeline.pp_layout} has {sum(given)} layers, num_hidden_layers={layers}", "change --pp-layout")
    if 0 in given:
        raise TronError(f"pp_layout={pipeline.pp_layout} leaves a chunk without a layer", "change --pp-layout")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def cuts(model: ModelConfig, tp: int) -> bool:
    """Whether the heads and the feed-forward of a model can be cut over so many ranks of tp."""
    kv_heads = model.num_key_value_heads
    return model.num_attention_heads % tp == 0 and model.ffn_size % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0


def check_cut(model: ModelConfig, mesh: MeshConfig) -> None:
    """Refuse a model that the mesh cannot cut.

    Raises: TronError that names the size, the axis and the degrees that would do.
    """
    tp, heads, kv_heads, ffn = mesh.tp_size, model.num_attention_heads, model.num_key_value_heads, model.ffn_size
    if cuts(model, tp):
        return
    valid = [d for d in range(min(tp, heads), 0, -1) if cuts(model, d)]
    fix = "use --tp-size " + " or ".join(map(str, valid))
    if heads % tp:
        raise TronError(f"num_attention_heads={heads} cannot be cut over tp={tp}", fix)
    if ffn % tp:
        raise TronError(f"intermediate_size={ffn} cannot be cut over tp={tp}", f"{fix}, or change --intermediate-size")
    raise TronError(f"num_key_value_heads={kv_heads} and tp={tp}: one must be a multiple of the other", fix)


def check_heads(model: ModelConfig, mesh: MeshConfig, strategy: StrategyConfig) -> None:
    """Refuse all-to-all attention over more ranks than share out the query heads evenly; to be asked after ``check_cut``.

    Raises: TronError.
    """
    heads = model.num_attention_heads // mesh.tp_size
    if strategy.cp_comm_type != "a2a" or heads % mesh.cp_size == 0:
        return
    over = f"cp={mesh.cp_size}" if mesh.tp_size == 1 else f"tp={mesh.tp_size} x cp={mesh.cp_size}"
    sizes = " or ".join(str(size) for size in divisors(heads) if size < mesh.cp_size)
    raise TronError(
        f"num_attention_heads={model.num_attention_heads} cannot be cut over {over} by cp_comm_type=a2a",
        f"use --cp-size {sizes}, or --cp-comm-type ring",
    )


def describe_switches(mesh: MeshConfig, strategy: StrategyConfig) -> str:
    """The switches that are on, in words."""
    names = ("sequence_parallel", "vocab_parallel", "async_communication")
    found = [name.replace("_", " ") for name in names if getattr(strategy, name)]
    if mesh.cp_size > 1:
        found.append(f"context by {strategy.cp_comm_type.replace('_', '-')}, {strategy.sequence_layout}")
    if strategy.zero:
        found.append(f"ZeRO {strategy.zero}")
    if strategy.recompute != "none":
        found.append(f"recompute {strategy.recompute}")
    return ", ".join(found) or "no other switch"
