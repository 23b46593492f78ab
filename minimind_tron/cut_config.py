"""How a model and a batch are cut over a mesh: what every command about ranks is told; checked as ``config`` is."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from minimind_tron.config import BatchConfig, Config, Dtype, ModelConfig
from minimind_tron.errors import TronError
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig, check_cut, check_depth, check_heads


class CutConfig(Config):
    """A model and a batch, cut over a mesh, and the types of their numbers."""

    usual_dtype: ClassVar[Dtype] = "float32"
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    strategy: StrategyConfig = StrategyConfig()
    pipeline: PipelineConfig = PipelineConfig()
    batch: BatchConfig = BatchConfig()
    dtype: Dtype | None = None
    """Type of weights, activations and messages; float64 in validate and float32 elsewhere unless given."""
    precision: Literal["full", "mixed"] = "full"
    """mixed computes in bfloat16 and updates float32 masters of the weights; full does all in --dtype."""

    @model_validator(mode="after")
    def _check_cut(self) -> Self:
        if self.precision == "mixed" and self.dtype not in (None, "float32"):
            raise TronError(
                f"precision=mixed computes in bfloat16 and updates float32 masters, but dtype={self.dtype} was given",
                "leave out --dtype, or use --precision full",
            )
        self._check_batch()
        self.check_model()
        return self

    def _check_batch(self) -> None:
        dp, size, samples = self.mesh.dp_size, self.batch.micro_batch_size, self.samples
        if samples % (dp * size):
            least = dp * size
            sizes = sorted({max(least, samples // least * least), samples // least * least + least})
            smaller = f", or --micro-batch-size {samples // dp}" if samples % dp == 0 and samples // dp < size else ""
            raise TronError(
                f"global_batch_size={samples} cannot be shared out over dp={dp} in microbatches of {size}",
                f"use --global-batch-size {' or '.join(map(str, sizes))}{smaller}",
            )

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return self.batch.samples

    @property
    def passes(self) -> int:
        """Microbatches of one rank in a step."""
        return self.samples // (self.batch.micro_batch_size * self.mesh.dp_size)

    @property
    def compute_dtype(self) -> Dtype:
        """Type of weights, activations and messages."""
        return "bfloat16" if self.precision == "mixed" else self.dtype or self.usual_dtype

    @property
    def master_dtype(self) -> Dtype | None:
        """Type of the masters that are kept beside the weights, where there are any."""
        return "float32" if self.precision == "mixed" else None

    def check_model(self) -> None:
        """Refuse a model that the mesh cannot cut, and samples longer than its positions.

        Raises: TronError.
        """
        check_cut(self.model, self.mesh)
        check_heads(self.model, self.mesh, self.strategy)
        check_depth(self.model, self.mesh.pp_size, self.pipeline)
        if self.batch.seq_len > self.model.max_position_embeddings:
            raise TronError(
                f"seq_len={self.batch.seq_len} is beyond max_position_embeddings={self.model.max_position_embeddings}",
                "lower --seq-len or raise --max-position-embeddings",
            )
