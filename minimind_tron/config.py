"""What a run is: frozen records, checked when they are made, before any process starts and without importing torch."""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from minimind_tron.errors import TronError

# Whatever is counted here fits; more is a slip of the hand, and would end in memory that no machine has.
LARGEST = 2**31 - 1
DTYPES = ("float64", "float32", "bfloat16")
Dtype = Literal["float64", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the known name closest to a misspelt one, or an empty string."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


class Config(BaseModel):
    """A frozen record whose mistakes are TronErrors that name the flag."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._translated(error) from None

    @classmethod
    def _translated(cls, error: ValidationError) -> TronError:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            return TronError(f"{name} is not a known key", nearest(name, cls.model_fields))
        return TronError(f"{name}={first['input']!r} was given: {first['msg'].lower()}", f"change {flag(name)}")

    @model_validator(mode="after")
    def _check_magnitudes(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > LARGEST:
                raise TronError(f"{name}={value} was given, at most {LARGEST} is wanted", f"lower {flag(name)}")
        return self

    def _at_least(self, least: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise TronError(f"{name}={value} was given, at least {least} is wanted", f"change {flag(name)}")


def divisors(*numbers: int) -> list[int]:
    """The common divisors of some numbers, largest first."""
    common = math.gcd(*numbers)
    return [d for d in range(common, 0, -1) if common % d == 0]


class ModelConfig(Config):
    """MiniMind's dense architecture, which is Qwen3's; the defaults are the 64M model."""

    vocab_size: int = 6400
    """Rows of the embedding, columns of the head."""
    hidden_size: int = 768
    """Width of the hidden states."""
    num_hidden_layers: int = 8
    """Decoder blocks."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int = 4
    """Key / value heads; each serves the same number of query heads."""
    head_dim: int | None = None
    """Width of a head; hidden size / heads unless given."""
    intermediate_size: int | None = None
    """Width of the feed-forward; ceil(hidden * pi / 64) * 64 unless given."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 1e6
    """Base of the rotary angles."""
    tie_word_embeddings: bool = True
    """The head uses the embedding's matrix."""
    attention_bias: bool = False
    """Biases on q, k, v and o projections."""
    max_position_embeddings: int = 32768
    """Longest sequence, written into exported models."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        self._at_least(2, "vocab_size")
        self._at_least(1, *counts, "head_dim", "intermediate_size", "max_position_embeddings")
        for name in ("rms_norm_eps", "rope_theta"):
            if getattr(self, name) <= 0:
                raise TronError(f"{name}={getattr(self, name)} was given, more than 0 is wanted", f"change {flag(name)}")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise TronError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}",
                "change one of them or give --head-dim",
            )
        if self.head_width % 2:
            raise TronError(
                f"head_dim={self.head_width} is odd, and rotary positions turn pairs of channels",
                "change --head-dim, --hidden-size or --num-attention-heads",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise TronError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}",
                f"use --num-key-value-heads {' or '.join(map(str, divisors(self.num_attention_heads)))}",
            )
        return self

    @property
    def head_width(self) -> int:
        """Width of a head (H)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward (F)."""
        return self.intermediate_size or math.ceil(self.hidden_size * math.pi / 64) * 64

    @property
    def num_parameters(self) -> int:
        """Logical parameters, tied weights counted once."""
        D, H, N, K = self.hidden_size, self.head_width, self.num_attention_heads, self.num_key_value_heads
        attention = 2 * D * N * H + 2 * D * K * H + 2 * H
        biases = (N * H + 2 * K * H + D) if self.attention_bias else 0
        block = attention + biases + 3 * D * self.ffn_size + 2 * D
        return self.num_hidden_layers * block + D + self.vocab_size * D * (1 if self.tie_word_embeddings else 2)


class MeshConfig(Config):
    """How many ranks each axis has."""

    tp_size: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks that share every matrix (tensor parallelism)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "tp_size")
        return self

    @property
    def degrees(self) -> dict[str, int]:
        """The size of every axis, outermost first."""
        return {"dp": 1, "pp": 1, "cp": 1, "tp": self.tp_size}

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
            fits = model is None or cuts(model, world_size)
            raise TronError(
                f"the launcher started {_ranks(world_size)}, but the mesh {degrees} has {self.world_size}",
                f"use --tp-size {world_size}, or start {_ranks(self.world_size)}" if fits else f"start {_ranks(self.world_size)}",
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


class BatchConfig(Config):
    """How much work one optimizer step is."""

    seq_len: int = 340
    """Tokens a sample."""
    global_batch_size: int | None = None
    """Samples an optimizer step, whatever the mesh; the microbatch size unless given."""
    micro_batch_size: int = 2
    """Samples a forward pass; global batch / micro batch passes make a step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "seq_len", "global_batch_size", "micro_batch_size")
        if self.samples % self.micro_batch_size:
            low = self.samples // self.micro_batch_size * self.micro_batch_size
            sizes = [str(size) for size in (low, low + self.micro_batch_size) if size]
            raise TronError(
                f"global_batch_size={self.samples} is not a whole number of micro_batch_size={self.micro_batch_size}",
                f"use --global-batch-size {' or '.join(sizes)}",
            )
        return self

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return self.global_batch_size or self.micro_batch_size


class OptimizerConfig(Config):
    """AdamW, its schedule and the clipping of the global norm."""

    learning_rate: float = 5e-4
    """Peak learning rate."""
    min_learning_rate: float | None = None
    """Where the cosine ends; a tenth of the peak unless given."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(0, "learning_rate", "min_learning_rate", "warmup_steps", "weight_decay", "clip_norm")
        # What has no gradient, such as padding, is divided by this alone; less would be 0 in float32.
        self._at_least(1e-20, "eps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise TronError(f"{name}={getattr(self, name)} was given, 0 <= {name} < 1 is wanted", f"change {flag(name)}")
        if self.floor > self.learning_rate:
            raise TronError(
                f"min_learning_rate={self.floor} is above learning_rate={self.learning_rate}", "lower --min-learning-rate"
            )
        return self

    @property
    def floor(self) -> float:
        """Learning rate at the end of the schedule."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate


def _existing(name: str, path: Path | None, kinds: str = "file or folder") -> None:
    if path is not None and not path.exists():
        raise TronError(f"{name}={path} is not there, a {kinds} is wanted", f"change {flag(name)}")


class RunConfig(Config):
    """What train and validate have in common: a model, on a mesh, on a device."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    strategy: StrategyConfig = StrategyConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    seed: int = 42
    """Decides the weights at step 0 and the order of the samples."""
    device: Device = "auto"
    """auto takes the GPU where there is one."""

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        self._at_least(0, "seed")
        self.check_model()
        return self

    def check_model(self) -> None:
        """Refuse a model that the mesh cannot cut, and samples longer than its positions.

        Raises: TronError.
        """
        check_cut(self.model, self.mesh)
        if self.batch.seq_len > self.model.max_position_embeddings:
            raise TronError(
                f"seq_len={self.batch.seq_len} is beyond max_position_embeddings={self.model.max_position_embeddings}",
                "lower --seq-len or raise --max-position-embeddings",
            )

    def check_before_start(self) -> None:
        """What only the process that starts the ranks, or rank 0, may ask; see the commands.

        Raises: TronError.
        """


DEFAULT_STEPS = 1000


class TrainConfig(RunConfig):
    """Train on text, measure held-out loss, export the model."""

    data: Path | None = None
    """A .txt file or a .jsonl file of {"text": ...}; the standard library's sources unless given."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer folder; bytes unless given."""
    output_dir: Path = Path("out/train")
    """Where metrics, the loss curve and the model go; must not hold another run."""
    dtype: Literal["float64", "float32"] = "float32"
    """Type of weights, activations and messages."""
    steps: int | None = None
    """Optimizer steps; 1000 unless --epochs is given."""
    epochs: float | None = None
    """Passes over the training samples, instead of --steps."""
    log_interval: int = 10
    """Steps between two lines in the metrics file."""
    eval_interval: int = 200
    """Steps between two measurements of the held-out loss; the last step always has one."""
    eval_batches: int = 16
    """Microbatches of held-out text a measurement takes."""
    sample_tokens: int = 200
    """Length of the greedy sample at the end; 0 for none."""
    sample_prompt: str = "def "
    """What the greedy sample continues."""

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        self._at_least(1, "steps", "log_interval", "eval_interval", "eval_batches")
        self._at_least(0, "sample_tokens")
        if self.steps is not None and self.epochs is not None:
            raise TronError(f"steps={self.steps} and epochs={self.epochs} were both given", "give --steps or --epochs")
        if self.epochs is not None and self.epochs <= 0:
            raise TronError(f"epochs={self.epochs} was given, more than 0 is wanted", "change --epochs")
        if self.epochs is None and self.optimizer.warmup_steps >= (self.steps or DEFAULT_STEPS):
            raise TronError(
                f"warmup_steps={self.optimizer.warmup_steps} leaves none of {self.steps or DEFAULT_STEPS} steps at the peak",
                "lower --warmup-steps or raise --steps",
            )
        if not self.sample_prompt:
            raise TronError("sample_prompt is empty, text to continue is wanted", "change --sample-prompt")
        _existing("data", self.data, "file")
        if self.data is not None and self.data.is_file() and not self.data.stat().st_size:
            raise TronError(f"data={self.data} is empty", "set --data to a .txt or .jsonl file with text")
        _existing("tokenizer", self.tokenizer, "folder")
        return self

    def check_before_start(self) -> None:
        """Refuse an output folder that another run has written to.

        Raises: TronError when it is not empty, or is a file.
        """
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise TronError(f"output_dir={self.output_dir} is a file, a folder is wanted", "change --output-dir")
        if self.output_dir.exists() and any(self.output_dir.iterdir()):
            raise TronError(f"output_dir={self.output_dir} holds another run", "choose an empty --output-dir")


class ValidateConfig(RunConfig):
    """Prove the parallel model equal to transformers' Qwen3."""

    dtype: Dtype = "float64"
    """Type of weights and activations; the oracle is float64 always."""
    optimizer_steps: int = 20
    """AdamW steps after the first comparison."""
    log_interval: int = 5
    """Steps between two comparisons of the logits."""
    check_backward: bool = True
    """Compare gradients and take optimizer steps."""
    atol: float | None = None
    """With --rtol, replaces the rule: a tensor may be off by atol + rtol * its largest element."""
    rtol: float | None = None
    """See --atol."""
    weights: Path | None = None
    """A Hugging Face Qwen3 folder, whose config.json replaces the model's flags, or a MiniMind .pth file; drawn by --seed
    unless given."""
    json_file: Annotated[Path | None, tyro.conf.arg(aliases=["--json"])] = None
    """Where the whole report goes as JSON."""

    @model_validator(mode="after")
    def _check_validate(self) -> Self:
        self._at_least(0, "optimizer_steps", "atol", "rtol")
        self._at_least(1, "log_interval")
        if self.batch.seq_len < 2:
            raise TronError("seq_len=1 was given, and a single position has no gradient for q and k", "use --seq-len 2 or more")
        _existing("weights", self.weights)
        if self.json_file is not None and (self.json_file.is_dir() or not self.json_file.parent.is_dir()):
            raise TronError(f"json_file={self.json_file} is not a file in a folder that is there", "change --json")
        return self

    def check_model(self) -> None:
        """Refuse a model that the mesh cannot cut, once it is known: a folder of weights brings its own.

        Raises: TronError.
        """
        if self.weights is None or not self.weights.is_dir():
            super().check_model()

    def with_model(self, model: ModelConfig) -> Self:
        """This config about the model in its weights folder.

        Raises: TronError when the mesh cannot cut that model.
        """
        known = self.model_copy(update={"model": model})
        RunConfig.check_model(known)
        return known
