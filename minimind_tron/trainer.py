"""The loop: batch, learning rate, step, and what is said and written about it.

Every rank runs the same loop over the same batches and comes to the same decisions, since losses and norms are bit-equal on all of
them; only the rank that is given a metrics file writes, and only a display that is not silent prints.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from minimind_tron.dropout import Noise
from minimind_tron.errors import TronError
from minimind_tron.model import Model
from minimind_tron.optim import build_adamw, learning_rate_at, set_learning_rate
from minimind_tron.parallel.pipeline import Timed
from minimind_tron.run_config import DEFAULT_STEPS, TrainConfig
from minimind_tron.runtime import say
from minimind_tron.step import StepResult, evaluate, schedule_of, train_step
from minimind_tron.tokens import Corpus, batch_at, heldout_batches
from minimind_tron.trace import traced

# Without a terminal, a line at most this often: a log file is not a progress bar.
PLAIN_INTERVAL_S = 10.0
# The first steps are slower than those to come: memory is allocated, kernels are chosen.
TRACED_STEP = 3


@dataclass(frozen=True)
class Heldout:
    """The loss on held-out text, per token and per byte of UTF-8."""

    nats_per_token: float
    nats_per_byte: float


@dataclass(frozen=True)
class Trained:
    """What the loop did: the last step's loss in nats a token, the last held-out loss, labels learned from, wall time.

    ``unlabelled`` steps had no valid label, ``skipped`` ones no finite gradient: neither changed anything. ``traced`` is whether a
    step was traced.
    """

    steps: int
    unlabelled: int
    skipped: int
    loss: float
    heldout: Heldout
    tokens: int
    seconds: float
    traced: bool = False


class Metrics:
    """A JSONL file, complete up to the last line at any moment; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = path.open("a", encoding="utf-8") if path else None

    def write(self, **values: Any) -> None:
        """Append one line; a value that JSON has no word for (NaN, infinity) is an error of the caller's."""
        if self._file:
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; more than once is allowed."""
        if self._file:
            self._file.close()


class Display:
    """What is shown of a running loop; this one shows nothing, for all ranks but one."""

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """A step is done."""

    def heldout(self, step: int, heldout: Heldout) -> None:
        """The held-out loss was measured."""


class Lines(Display):
    """A plain line every so often, for log files and pipes."""

    def __init__(self, steps: int) -> None:
        self.steps, self.start_s = steps, time.perf_counter()
        self.shown_s = self.start_s

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """A line if the last one is long ago, and at the end."""
        now = time.perf_counter()
        if now - self.shown_s < PLAIN_INTERVAL_S and step < self.steps:
            return
        self.shown_s = now
        left_s = (now - self.start_s) / step * (self.steps - step)
        say(f"step {step:>6}/{self.steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {left_s:.0f} s left")

    def heldout(self, step: int, heldout: Heldout) -> None:
        """Always a line."""
        say(f"step {step:>6}/{self.steps}  held-out loss {heldout.nats_per_byte:.4f} nats/byte")


class Bar(Display):
    """A live progress bar, for a terminal."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """The bar moves on."""
        self.progress.update(self.task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_s:,.0f} tokens/s")

    def heldout(self, step: int, heldout: Heldout) -> None:
        """Stays in the bar until the next measurement."""
        self.progress.update(self.task, heldout=f"held-out {heldout.nats_per_byte:.4f} nats/byte")


@contextmanager
def show(steps: int, speaks: bool) -> Iterator[Display]:
    """A bar on a terminal, lines elsewhere, silence for ranks that do not speak."""
    if not speaks:
        yield Display()
    elif not sys.stdout.isatty():
        yield Lines(steps)
    else:
        from rich import progress as rich

        texts = ("loss {task.fields[loss]}", "{task.fields[heldout]}", "{task.fields[speed]}")
        columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *map(rich.TextColumn, texts), rich.TimeRemainingColumn())
        with rich.Progress(*columns) as progress:
            yield Bar(progress, progress.add_task("train", total=steps, loss="", heldout="", speed=""))


def count_steps(config: TrainConfig, samples: int) -> int:
    """The optimizer steps of a run: those given, or as many as the epochs take, the last batch running on into the next epoch."""
    if config.epochs is None:
        return config.steps or DEFAULT_STEPS
    # Rounded first: 0.1 epochs of 30 samples are 3, not 3.0000000000000004.
    return max(1, math.ceil(round(config.epochs * samples / config.batch.samples, 6)))


def measure_heldout(model: Model, corpus: Corpus, config: TrainConfig) -> Heldout:
    """The mean loss over the first ``eval_batches`` microbatches of held-out text, the same text at every call.

    Cost: one forward per microbatch. Raises: TronError where it is not finite.
    """
    size = config.batch.micro_batch_size
    loss = evaluate(model, heldout_batches(corpus.heldout, size, config.eval_batches), size)
    if not math.isfinite(loss):
        raise TronError(f"the held-out loss is {loss}: the weights are no longer numbers", "lower --learning-rate")
    return Heldout(loss, loss / corpus.bytes_per_token)


@dataclass
class Tally:
    """Labels and seconds that went into training steps, in all and since the last line of metrics."""

    tokens: int = 0
    seconds: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.new_tokens, self.new_seconds = self.new_tokens + tokens, self.new_seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        """Speed since the last line of metrics, held-out measurements not counted."""
        return self.new_tokens / max(self.new_seconds, 1e-9)

    def start_line(self) -> None:
        """A line of metrics was written."""
        self.new_tokens, self.new_seconds = 0, 0.0


class Trainer:
    """A model, its optimizer and its text, taken through the steps of a run.

    Numbers of steps count from 1 in everything that is shown or written: step t is the one after which t updates were made.
    """

    def __init__(self, model: Model, corpus: Corpus, config: TrainConfig, metrics: Metrics, display: Display) -> None:
        self.model, self.corpus, self.config = model, corpus, config
        self.metrics, self.display = metrics, display
        self.steps = count_steps(config, len(corpus.train))
        self.optimizer = build_adamw(model, config.optimizer)
        self.tally, self.loss = Tally(), math.nan
        self.unlabelled, self.skipped, self.skipped_in_a_row = 0, 0, 0
        self.trace = config.trace

    def run(self) -> Trained:
        """All steps. Raises: TronError when too many in a row had no finite loss or gradient norm."""
        start_s = time.perf_counter()
        heldout = Heldout(math.nan, math.nan)
        for step in range(1, self.steps + 1):
            self._train(step, start_s)
            if step % self.config.eval_interval == 0 or step == self.steps:
                heldout = self._measure(step)
        if self.trace:
            say("no step was traced: from the first that might have been on, none had a valid label")
        seconds, traced = time.perf_counter() - start_s, self.trace is not self.config.trace
        return Trained(self.steps, self.unlabelled, self.skipped, self.loss, heldout, self.tally.tokens, seconds, traced)

    def _train(self, step: int, start_s: float) -> None:
        config, begin_s = self.config, time.perf_counter()
        learning_rate = learning_rate_at(step - 1, self.steps, config.optimizer)
        set_learning_rate(self.optimizer, learning_rate)
        batch = batch_at(self.corpus.train, step - 1, config.batch.samples, config.seed)
        seconds = 0.0

        def run(timed: list[Timed] | None = None) -> StepResult:
            nonlocal seconds
            size, clip_norm = config.batch.micro_batch_size, config.optimizer.clip_norm
            noise = Noise(config.dropout, config.seed, step - 1)
            result = train_step(self.model, self.optimizer, batch, size, clip_norm, noise, timed)
            seconds = time.perf_counter() - begin_s
            return result

        if self.trace and step >= min(TRACED_STEP, self.steps):
            result, bubbles = traced(self.trace, schedule_of(self.model, config.passes), self.model.mesh, run)
            # A step without any label has nothing to show; then the next one is traced.
            self.trace = self.trace if bubbles is None else None
            if bubbles:
                say(f"step {step}: traced; bubble {bubbles}")
        else:
            result = run()
        if not result.finite:
            self._skip(step, result, learning_rate)
            return
        self.skipped_in_a_row = 0
        self.tally.add(result.valid_tokens, seconds)
        if not result.valid_tokens:
            self._note_unlabelled(step)
            return
        self.loss = result.loss
        self.display.step(step, result.loss, self.tally.tokens_per_s)
        if step == 1 or step % config.log_interval == 0 or step == self.steps:
            self._log(step, result, learning_rate, time.perf_counter() - start_s)

    def _note_unlabelled(self, step: int) -> None:
        self.unlabelled += 1
        self.metrics.write(step=step, skipped="no valid label")
        say(f"step {step}: no valid label in the whole batch, nothing was changed")

    def _skip(self, step: int, result: StepResult, learning_rate: float) -> None:
        """A step that has no finite gradients changed nothing, on any rank; loss and norm are the same on all of them."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        found = f"loss {result.loss}, gradient norm {result.gradient_norm}"
        self.metrics.write(step=step, skipped=found)
        if self.skipped_in_a_row >= self.config.max_skipped:
            row = f"{self.skipped_in_a_row} steps in a row were skipped" if self.skipped_in_a_row > 1 else "it was skipped"
            raise TronError(
                f"step {step}: {found}; {row}: training has diverged at learning rate {learning_rate:g} and no model was saved",
                "lower --learning-rate, lengthen --warmup-steps, or raise --max-skipped",
            )
        say(f"step {step}: {found}; skipped, nothing was changed ({self.skipped} so far)")

    def _log(self, step: int, result: StepResult, learning_rate: float, seconds: float) -> None:
        self.metrics.write(
            step=step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=learning_rate,
            tokens=self.tally.tokens,
            seconds=round(seconds, 3),
            tokens_per_s=round(self.tally.tokens_per_s, 1),
        )
        self.tally.start_line()

    def _measure(self, step: int) -> Heldout:
        heldout = measure_heldout(self.model, self.corpus, self.config)
        self.metrics.write(step=step, heldout_loss=heldout.nats_per_token, heldout_nats_per_byte=heldout.nats_per_byte)
        self.display.heldout(step, heldout)
        return heldout


@dataclass(frozen=True)
class References:
    """What a loss is to be held against, in nats a byte of held-out text."""

    uniform: float
    byte_unigram: float


def unigram_entropy(text: bytes) -> float:
    """The loss, in nats a byte, of the best model that knows how often each byte of a text occurs and nothing else."""
    if not text:
        return 0.0
    shares = torch.bincount(torch.frombuffer(bytearray(text), dtype=torch.uint8), minlength=256).double() / len(text)
    return float(torch.special.entr(shares).sum())


def train(model: Model, corpus: Corpus, config: TrainConfig, references: References, metrics_path: Path | None) -> Trained:
    """Train a model as the config says; the rank that is given a path for metrics writes them and shows the progress.

    Metrics are one line of JSON each: first the references (nats a byte) and bytes per token, then lines of training steps (loss
    in nats a token) and of held-out measurements.
    Raises: TronError when too many steps in a row had no finite loss or gradient norm.
    """
    metrics = Metrics(metrics_path)
    metrics.write(bytes_per_token=corpus.bytes_per_token, uniform=references.uniform, byte_unigram=references.byte_unigram)
    try:
        with show(count_steps(config, len(corpus.train)), metrics_path is not None) as display:
            return Trainer(model, corpus, config, metrics, display).run()
    finally:
        metrics.close()
