"""What a run is: frozen records, checked when they are made, before any process starts and without importing torch."""

import difflib
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

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

    overlooks: ClassVar[tuple[type["Config"], ...]] = ()
    """Configs whose keys may stand in a file for this one, too, and mean nothing here."""

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


class BatchConfig(Config):
    """How much work one optimizer step is."""

    seq_len: int = 340
    """Tokens a sample."""
    global_batch_size: int | None = None
    """Samples an optimizer step, whatever the mesh; the microbatch size unless given."""
    micro_batch_size: int = 2
    """Samples a forward pass; global batch / micro batch passes make a step."""
    num_microbatches: int | None = None
    """Another way to say the global batch size: so many microbatches; both given must agree."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "seq_len", "global_batch_size", "micro_batch_size", "num_microbatches")
        if self.num_microbatches and self.samples != (said := self.num_microbatches * self.micro_batch_size):
            raise TronError(
                f"num_microbatches={self.num_microbatches} of micro_batch_size={self.micro_batch_size} make {said} samples, "
                f"but global_batch_size={self.global_batch_size}",
                "give one of --num-microbatches and --global-batch-size",
            )
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
        return self.global_batch_size or self.micro_batch_size * (self.num_microbatches or 1)

    @property
    def passes(self) -> int:
        """Microbatches in the global batch."""
        return self.samples // self.micro_batch_size


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
