"""What a command is told: a model on a mesh and what is to be done with it; checked as ``config`` is, without importing torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

import tyro
from pydantic import model_validator

from minimind_tron.config import Device, Dtype, ModelConfig, OptimizerConfig, flag
from minimind_tron.cut_config import CutConfig
from minimind_tron.errors import TronError
from minimind_tron.new_files import distinct, placed, try_to_write

DEFAULT_STEPS = 1000
DEFAULT_SAMPLE = 200
# What train writes into its folder.
OUTPUTS = ("config.toml", "loss.png", "metrics.jsonl", "model", "sample.txt")


def _existing(name: str, path: Path | None, kinds: str = "file or folder") -> None:
    if path is not None and not path.exists():
        raise TronError(f"{name}={path} is not there, a {kinds} is wanted", f"change {flag(name)}")


def trace_files(path: Path | None) -> tuple[Path, ...]:
    """The trace, its picture and its page."""
    return () if path is None else (path, path.with_suffix(".png"), path.with_suffix(".html"))


class RunConfig(CutConfig):
    """What train and validate have in common: a model, on a mesh, on a device."""

    optimizer: OptimizerConfig = OptimizerConfig()
    seed: int = 42
    """Decides the weights at step 0, the order of the samples, and what is dropped."""
    device: Device = "auto"
    """auto takes the GPU where there is one."""
    dropout: float = 0.0
    """Probability with which an element of the embedding's or of an attention block's output is dropped, in training steps."""
    trace: Path | None = None
    """Where every action and collective of one step goes, as Chrome / Perfetto trace JSON, with a .png and a .html beside it."""

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        self._at_least(0, "seed")
        if not 0 <= self.dropout < 1:
            raise TronError(f"dropout={self.dropout} was given, 0 <= dropout < 1 is wanted", "change --dropout")
        if self.trace is not None and self.trace.suffix.lower() != ".json":
            raise TronError(f"trace={self.trace} is not a .json file", "change --trace")
        placed("trace", self.trace, self.made)
        return self

    @property
    def made(self) -> Path | None:
        """The folder that the run makes before it writes."""
        return None

    def check_before_start(self) -> None:
        """What only the process that starts the ranks, or rank 0, may ask; see the commands.

        Raises: TronError for a trace that would replace a file or cannot be written.
        """
        for path in trace_files(self.trace):
            if path.exists():
                raise TronError(f"trace={self.trace} would replace {path}", "remove it, or change --trace")
            if path.parent != self.made or path.parent.is_dir():
                try_to_write("trace", path)


def describe_numbers(config: RunConfig) -> str:
    """The dtype, the masters' where there are any, and dropout, in words."""
    masters = f" with {config.master_dtype} masters" if config.master_dtype else ""
    return config.compute_dtype + masters + (f", dropout {config.dropout:g}" if config.dropout else "")


class TrainConfig(RunConfig):
    """Train on text, measure held-out loss, export the model."""

    data: Path | None = None
    """A .txt file or a .jsonl file of {"text": ...}; the standard library's sources unless given."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer folder; bytes unless given."""
    output_dir: Path = Path("out/train")
    """Where metrics, the loss curve and the model go; must not hold another run."""
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
    sample_tokens: int | None = None
    """Length of the greedy sample at the end, 0 for none; 200 unless given, and none under context parallelism."""
    sample_prompt: str = "def "
    """What the greedy sample continues."""
    max_skipped: int = 10
    """Steps in a row whose gradients may be infinite or not a number before the run stops; each is skipped by all ranks."""

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        self._at_least(1, "steps", "log_interval", "eval_interval", "eval_batches", "max_skipped")
        self._at_least(0, "sample_tokens")
        if self.sample_tokens and self.mesh.cp_size > 1:
            raise TronError(
                f"sample_tokens={self.sample_tokens} was given, and text is not generated over cp={self.mesh.cp_size}",
                "leave out --sample-tokens, or use --cp-size 1",
            )
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
        distinct({"output_dir": tuple(self.output_dir / name for name in OUTPUTS), "trace": trace_files(self.trace)})
        return self

    @property
    def sample_length(self) -> int:
        """Tokens of the greedy sample at the end."""
        if self.sample_tokens is not None:
            return self.sample_tokens
        return 0 if self.mesh.cp_size > 1 else DEFAULT_SAMPLE

    @property
    def made(self) -> Path | None:
        """The output folder."""
        return self.output_dir

    def check_before_start(self) -> None:
        """Refuse an output folder that another run has written to, and what ``RunConfig`` refuses.

        Raises: TronError when it is not empty, or is a file.
        """
        super().check_before_start()
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise TronError(f"output_dir={self.output_dir} is a file, a folder is wanted", "change --output-dir")
        if self.output_dir.exists() and any(self.output_dir.iterdir()):
            raise TronError(f"output_dir={self.output_dir} holds another run", "choose an empty --output-dir")


class ValidateConfig(RunConfig):
    """Prove the parallel model equal to transformers' Qwen3 in float64."""

    usual_dtype: ClassVar[Dtype] = "float64"
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
        placed("json_file", self.json_file)
        distinct({"trace": trace_files(self.trace), "json_file": (self.json_file,) if self.json_file else ()})
        if self.trace is not None and not (self.check_backward and self.optimizer_steps):
            raise TronError("trace was given, but no optimizer step", "raise --optimizer-steps, or leave out --trace")
        return self

    def check_before_start(self) -> None:
        """Refuse a report that cannot be written, and what ``RunConfig`` refuses.

        Raises: TronError.
        """
        super().check_before_start()
        if self.json_file is not None:
            try_to_write("json_file", self.json_file)

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
