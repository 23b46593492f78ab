"""How a difference is judged: what a run shows, how far two runs are apart, and how far they may be.

Per tensor, never per element; norms of differences are taken in float64; a NaN or a missing tensor fails.

- *exact* (float64): every error at most 1e-10. Where that fails, the oracle is run again with every weight moved by a few eps; a
  model or a training so ill-conditioned that this alone moves a quantity gets ten times that movement as its limit.
- *noise floor* (float32, bfloat16): the parallel run's error against the float64 oracle, over the error that a dense run in the
  same dtype has against it (at least the dtype's eps); the ratio has a limit by kind of quantity.
  AdamW divides by the gradient's own size, so where gradients are near its eps one element's rounding can outweigh all others,
  and the dense run's error there is a matter of luck. When only what comes after AdamW is beyond its limit, a second floor is
  measured: how far the oracle moves when every gradient is shifted by twice its rounding error. The larger floor counts.
- *tolerance* (``--atol``, ``--rtol``): the largest |a - b| of a tensor at most atol + rtol * the largest |b|.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from minimind_tron.tokens import Batch

EXACT = 1e-10
GRADIENT_FLOOR = 1e-3
# How much of what moving the oracle's weights by a few eps does is allowed where that is more than EXACT.
CONDITIONING = 10.0
# A floor above this proves nothing: rounding alone makes another model of it.
HOPELESS, HOPELESS_EPS = 1e-2, 50.0
Named = dict[str, Tensor]
Rule = Literal["exact", "noise floor", "tolerance"]
Kind = Literal["logits", "loss", "gradient", "gradients", "norm", "trained logits", "parameter", "parameters"]
# A ratio to the noise floor above these is no longer rounding. Correct code was seen at 1.1, 1.1, 1.4 and 3.2.
RATIO_LIMITS: dict[Kind, float] = {
    "logits": 1.5,
    "gradients": 1.5,
    "loss": 2.0,
    "parameters": 2.0,
    "trained logits": 2.0,
    "norm": 5.0,
    "gradient": 5.0,
    "parameter": 5.0,
}


class Subject(Protocol):
    """Something that can be trained step by step and looked at; every tensor it shows is whole and on the CPU."""

    def logits(self, batch: Batch) -> Tensor:
        """The logits of a batch. Shapes: [B, S, V]."""
        ...

    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch."""
        ...

    def gradients(self, batch: Batch) -> tuple[dict[str, Tensor], float]:
        """The raw gradient of every parameter, and the norm of all."""
        ...

    def step(self, batch: Batch) -> None:
        """One optimizer step."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter as it is now."""
        ...


@dataclass(frozen=True)
class Plan:
    """What is recorded of a run: losses of some batches before the first step, logits of batch 0 every ``interval`` steps."""

    steps: int
    interval: int
    backward: bool
    loss_batches: int

    @property
    def looks(self) -> set[int]:
        """After which numbers of optimizer steps the logits are recorded."""
        return {self.steps, *range(self.interval, self.steps + 1, self.interval)}


@dataclass
class Run:
    """What a run showed; names of tensors are Hugging Face's, tied weights once."""

    losses: list[float] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    gradient_norm: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)


def record(subject: Subject, batch_at: Callable[[int], Batch], plan: Plan, look: Callable[[str], None]) -> Run:
    """Take a subject through the plan; ``look`` is told what is being done."""
    run, first = Run(), batch_at(0)
    look("forward")
    run.logits[0] = subject.logits(first)
    run.losses = [subject.loss(batch_at(i)) for i in range(plan.loss_batches)]
    if not plan.backward:
        return run
    look("backward")
    gradients, run.gradient_norm = subject.gradients(first)
    run.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    for step in range(plan.steps):
        look(f"step {step + 1}/{plan.steps}")
        subject.step(batch_at(step))
        if step + 1 in plan.looks:
            run.logits[step + 1] = subject.logits(first)
    run.parameters = {name: weight.clone() for name, weight in subject.parameters().items()}
    return run


def _norm(x: Tensor) -> float:
    return float(x.double().norm())


def relative(difference: float, size: float) -> float:
    """A difference over the size of what it should be; nothing over nothing is 0."""
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


@dataclass(frozen=True)
class Finding:
    """One compared quantity: mean and largest absolute difference, relative error, and what it was allowed."""

    kind: Kind
    name: str
    mean: float
    largest: float
    error: float
    floor: float | None
    ratio: float | None
    limit: float
    passed: bool


@dataclass(frozen=True)
class Report:
    """Everything a validation found, and the rule that decided."""

    rule: Rule
    findings: list[Finding]
    copies_differ: list[str]

    @property
    def passed(self) -> bool:
        """Whether every finding is within its limit and all copies of replicated weights are bit-equal."""
        return bool(self.findings) and all(finding.passed for finding in self.findings) and not self.copies_differ

    @property
    def only_after_adamw(self) -> bool:
        """Whether it failed, but nothing did that was compared before the first optimizer step."""
        late = ("trained logits", "parameter", "parameters")
        return not self.passed and all(finding.passed or finding.kind in late for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 for a pass, 1 for a failure."""
        return 0 if self.passed else 1

    def hopeless(self, eps: float) -> Finding | None:
        """The first finding whose floor is so high that neither a pass nor a failure would mean anything.

        None when a finding with a low floor failed: that failure stands, whatever rounding did to others.
        """
        least = max(HOPELESS, HOPELESS_EPS * eps)
        lost = [f for f in self.findings if f.floor is not None and f.floor > least]
        sound_failure = any(not f.passed and f not in lost for f in self.findings)
        return lost[0] if lost and not sound_failure and not self.copies_differ else None

    @property
    def worst(self) -> Finding:
        """The finding nearest to, or furthest beyond, its limit."""

        def badness(finding: Finding) -> float:
            value = finding.error if finding.ratio is None else finding.ratio
            return math.inf if math.isnan(value) else value / finding.limit if finding.limit else math.inf

        failed = [finding for finding in self.findings if not finding.passed]
        return max(failed or self.findings, key=badness)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        findings = [{name: _plain(value) for name, value in asdict(finding).items()} for finding in self.findings]
        return {"passed": self.passed, "rule": self.rule, "copies_differ": self.copies_differ, "findings": findings}


def _plain(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Judge:
    """Compares a parallel run with the oracle, and with it the runs that show how far rounding alone goes.

    ``dense`` is a dense run in the dtype of the parallel one, ``kept_as`` the dtype of its parameters where that is another.
    ``shifted``, where given, is the oracle with shifted gradients; it
    counts for what comes after AdamW. ``moved``, where given, is the oracle with moved weights; it loosens the exact rule.
    """

    def __init__(
        self,
        oracle: Run,
        dense: Run,
        parallel: Run,
        dtype: torch.dtype,
        atol: float | None = None,
        rtol: float | None = None,
        shifted: Run | None = None,
        moved: Run | None = None,
        kept_as: torch.dtype | None = None,
    ) -> None:
        dense = moved or dense
        self.oracle, self.parallel, self.dense = oracle, parallel, dense
        self.trained = [dense] if shifted is None else [dense, shifted]
        self.atol, self.rtol = atol, rtol
        self.eps, self.parameter_eps = torch.finfo(dtype).eps, torch.finfo(kept_as or dtype).eps
        self.findings: list[Finding] = []
        self.rule: Rule = "exact" if dtype == torch.float64 else "noise floor"
        if atol is not None or rtol is not None:
            self.rule = "tolerance"

    def _add(self, kind: Kind, name: str, mean: float, largest: float, size: float, error: float, floor: float) -> None:
        if self.rule == "exact":
            limit, ratio = max(EXACT, CONDITIONING * floor), None
            passed = error <= limit
        elif self.rule == "tolerance":
            limit = (self.atol or 0.0) + (self.rtol or 0.0) * size
            ratio, passed = None, largest <= limit
        else:
            least = self.parameter_eps if kind in ("parameter", "parameters") else self.eps
            limit, ratio = RATIO_LIMITS[kind], error / max(floor, least)
            passed = ratio <= limit
        shown = None if self.rule == "exact" and not floor else floor
        self.findings.append(Finding(kind, name, mean, largest, error, shown, ratio, limit, passed))

    def numbers(self, kind: Kind, name: str, ours: list[float], dense: list[float], oracle: list[float]) -> None:
        """Compare numbers by the root mean square of their relative errors."""

        def rms(values: list[float]) -> float:
            squares = [relative(abs(a - b), abs(b)) ** 2 for a, b in zip(values, oracle, strict=True)]
            return math.sqrt(sum(squares) / len(squares))

        apart = [abs(a - b) for a, b in zip(ours, oracle, strict=True)]
        size = max(abs(b) for b in oracle)
        self._add(kind, name, sum(apart) / len(apart), max(apart), size, rms(ours), rms(dense))

    def tensors(self, kind: Kind, name: str, ours: Named, floors: list[Named], oracle: Named, least_size: float = 0.0) -> None:
        """Compare some tensors as one vector: the L2 norm of the difference over the oracle's norm, or over ``least_size``."""
        if any(n not in ours or ours[n].shape != tensor.shape for n, tensor in oracle.items()):
            self._add(kind, name, math.inf, math.inf, 0.0, math.inf, 0.0)
            return
        size = max(math.sqrt(sum(_norm(tensor) ** 2 for tensor in oracle.values())), least_size)

        def error(tensors: Named) -> float:
            return relative(math.sqrt(sum(_norm(tensors[n].double() - oracle[n].double()) ** 2 for n in oracle)), size)

        apart = {n: (ours[n].double() - tensor.double()).abs() for n, tensor in oracle.items()}
        count = sum(tensor.numel() for tensor in oracle.values())
        mean, largest = sum(float(a.sum()) for a in apart.values()) / count, max(float(a.max()) for a in apart.values())
        biggest = max(float(tensor.abs().max()) for tensor in oracle.values())
        self._add(kind, name, mean, largest, biggest, error(ours), max(map(error, floors)))

    def _logits(self, kind: Kind, name: str, step: int, floors: list[Run]) -> None:
        ours = {name: self.parallel.logits[step]} if step in self.parallel.logits else {}
        dense = [{name: floor.logits[step]} for floor in floors]
        self.tensors(kind, name, ours, dense, {name: self.oracle.logits[step]})

    def report(self, copies_differ: list[str]) -> Report:
        """Compare everything the oracle recorded, in the order it was recorded."""
        ours, dense, oracle = self.parallel, self.dense, self.oracle
        self._logits("logits", "logits", 0, [dense])
        self.numbers("loss", "loss", ours.losses, dense.losses, oracle.losses)
        if oracle.gradients:
            least = GRADIENT_FLOOR * oracle.gradient_norm
            for name, gradient in oracle.gradients.items():
                self.tensors("gradient", name, ours.gradients, [dense.gradients], {name: gradient}, least)
            self.tensors("gradients", "all gradients", ours.gradients, [dense.gradients], oracle.gradients)
            self.numbers("norm", "gradient norm", [ours.gradient_norm], [dense.gradient_norm], [oracle.gradient_norm])
        for step in sorted(oracle.logits)[1:]:
            self._logits("trained logits", f"logits after step {step}", step, self.trained)
        if len(oracle.logits) > 1:
            floors = [run.parameters for run in self.trained]
            for name, weight in oracle.parameters.items():
                self.tensors("parameter", name, ours.parameters, floors, {name: weight})
            self.tensors("parameters", "all parameters", ours.parameters, floors, oracle.parameters)
        return Report(self.rule, self.findings, copies_differ)


def rounding_shifts(oracle: Run, dense: Run) -> dict[str, float]:
    """Twice the root mean square of what rounding did to the elements of each gradient in a dense run."""
    return {
        name: 2 * _norm(dense.gradients[name].double() - gradient.double()) / math.sqrt(gradient.numel())
        for name, gradient in oracle.gradients.items()
    }
