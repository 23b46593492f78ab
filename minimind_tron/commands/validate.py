"""validate: is the parallel model the dense model?"""

import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from minimind_tron.collectives import gather_copies, gather_named, gather_objects, gather_whole, settle, share
from minimind_tron.config_files import flatten
from minimind_tron.dropout import Noise
from minimind_tron.errors import TronError
from minimind_tron.interop import load_weights
from minimind_tron.judge import EXACT, Finding, Judge, Plan, Report, Run, record, rounding_shifts
from minimind_tron.layout import Layout, layout_of, live
from minimind_tron.mesh import Axis, Mesh, build_mesh
from minimind_tron.model import Model, build_model, initialise
from minimind_tron.optim import build_adamw, global_norm
from minimind_tron.oracle import DenseSubject, build_qwen3, load_qwen3
from minimind_tron.parallel.pipeline import describe
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.run_config import ValidateConfig, describe_numbers
from minimind_tron.runtime import World, all_cores, say
from minimind_tron.step import compute_gradients, evaluate, logits_of, schedule_of, train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import MeshConfig, PipelineConfig, StrategyConfig, describe_switches
from minimind_tron.trace import traced

# Ones in norms and zeros in biases would hide what is done to them.
SPREAD = 0.1
SMALL = 1_000_000
# The loss is one number, and one number's rounding error may be small by luck.
NOISE_LOSS_BATCHES = 16
_IGNORED_SHARES = (0.1, 0.8, 0.0, 0.5)


def synthetic_batch(step: int, samples: int, seq_len: int, vocab_size: int, seed: int) -> Batch:
    """Random ids; labels are the next ids, with -100 at very uneven shares from sample to sample.

    The last label always counts: a batch with no label beyond position 0 has no gradient for q and k, and AdamW would then
    compare noise with noise.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    stream = torch.randint(0, vocab_size, (samples, seq_len + 1), generator=generator)
    labels = stream[:, 1:].clone()
    shares = torch.tensor([_IGNORED_SHARES[(step + i) % len(_IGNORED_SHARES)] for i in range(samples)])
    labels[torch.rand(labels.shape, generator=generator) < shares[:, None]] = IGNORED
    labels[:, -1] = stream[:, -1]
    return Batch(stream[:, :-1].clone(), labels)


class ParallelSubject:
    """Our model on its mesh, through the same functions as training; what it shows is gathered whole on every rank."""

    def __init__(self, model: Model, config: ValidateConfig) -> None:
        self.model, self.micro_batch_size = model, config.batch.micro_batch_size
        self.trace, self.passes, self.dropout = config.trace, config.passes, (config.dropout, config.seed)
        self.steps, self.steps_made = config.optimizer_steps, 0
        self.adamw, self.clip_norm = build_adamw(model, config.optimizer), config.optimizer.clip_norm

    def logits(self, batch: Batch) -> Tensor:
        """The logits of a batch. Shapes: [B, S, V], on the CPU."""
        return logits_of(self.model, batch, self.micro_batch_size).cpu()

    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch."""
        return evaluate(self.model, [batch], self.micro_batch_size)

    def gradients(self, batch: Batch) -> tuple[dict[str, Tensor], float]:
        """The raw gradient of every parameter, and the norm of all."""
        compute_gradients(self.model, batch, self.micro_batch_size, self._noise())
        norm = float(global_norm(self.model.masters.parameters(), self.model.mesh))
        return self._whole(self.model.masters.gradients()), norm

    def _noise(self) -> Noise:
        return Noise(*self.dropout, self.steps_made)

    def step(self, batch: Batch) -> None:
        """One training step, clipped as in training; the last one is traced, if any is to be."""
        run = partial(train_step, self.model, self.adamw, batch, self.micro_batch_size, self.clip_norm, self._noise())
        self.steps_made += 1
        if self.trace and self.steps_made == self.steps:
            _, bubbles = traced(self.trace, schedule_of(self.model, self.passes), self.model.mesh, run)
            say(f"traced the last step: bubble {bubbles}")
        else:
            run()

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter as it is now."""
        return self._whole(self.model.masters.values())

    def _whole(self, named: dict[str, tuple[Tensor, Layout]]) -> dict[str, Tensor]:
        """The whole tensors of all stages."""
        whole = {name: gather_whole(local, layout) for name, (local, layout) in named.items()}
        return {name: tensor.cpu() for name, tensor in gather_named(whole, self.model.mesh.pp).items()}


def differing_copies(model: Model) -> list[str]:
    """The parameters of which two ranks hold copies that are not bit-equal, the same list on every rank.

    Cost: one all-gather over tp of what is kept of every parameter, one over dp x cp unless it is cut there, and of a tied one over
    both ends of the pipeline; where masters are kept beside weights, of both.
    """
    mesh, differ = model.mesh, []
    kept = [(name, value, layout) for name, (value, layout) in model.masters.values().items()]
    if model.masters.mixed and not model.storage.passing:
        kept += [(name, weight.detach(), layout_of(weight)) for name, weight in model.named_parameters()]
    for name, value, layout in kept:
        parts = layout.cut.parts if layout.cut else 1
        others = [axis for axis in live(mesh.ends) if axis in layout.partial]
        others += [] if layout.shard else [mesh.data]
        same = _copies_agree(value, mesh.tp, parts)
        # Every rank takes part in every gather, whatever it has seen so far.
        if not all([same, *(_copies_agree(value, axis, 1) for axis in others)]):
            differ.append(name)
    for axis in live(mesh.tp, mesh.data, mesh.pp):
        differ = [name for names in gather_objects(differ, axis) for name in names]
    return list(dict.fromkeys(differ))


def _copies_agree(tensor: Tensor, axis: Axis, parts: int) -> bool:
    """Whether all ranks of an axis that hold the same of so many pieces hold the same bits."""
    bits = [copy.contiguous().view(torch.uint8) for copy in gather_copies(tensor, axis)]
    firsts = [bits[rank * parts // axis.size * axis.size // parts] for rank in range(axis.size)]
    return all(torch.equal(copy, first) for copy, first in zip(bits, firsts, strict=True))


def batch_of(config: ValidateConfig, step: int) -> Batch:
    """The synthetic batch of a step."""
    batch = config.batch
    return synthetic_batch(step, batch.samples, batch.seq_len, config.model.vocab_size, config.seed)


def plan_of(config: ValidateConfig) -> Plan:
    """What both sides of a validation record."""
    batches = 1 if config.compute_dtype == "float64" else NOISE_LOSS_BATCHES
    steps = config.optimizer_steps if config.check_backward else 0
    return Plan(steps, config.log_interval, config.check_backward, batches)


def _look(who: str, interval: int, what: str) -> None:
    step = what.removeprefix("step ").split("/")[0]
    if not step.isdigit() or int(step) % interval == 0:
        say(f"  {who}: {what}")


@dataclass(frozen=True)
class Disturbance:
    """What is done to the dense model to see how far rounding goes: gradients shifted, weights moved by a relative amount."""

    name: str = ""
    shifts: dict[str, float] | None = None
    moved_by: float = 0.0


UNDISTURBED = Disturbance()


@torch.no_grad()
def _move(weights: Iterable[Tensor], by: float) -> None:
    """Make every element larger or smaller by a relative amount, at random, the same way each time."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator).mul_(2).sub_(1)
        weight.mul_(1 + by * signs.to(weight))


def _dense_subject(config: ValidateConfig, dtype: str, device: torch.device, disturbed: Disturbance) -> DenseSubject:
    mixed = dtype != "float64" and config.precision == "mixed"
    # Under mixed precision weights are rounded from masters, which the file or the seed gives.
    first_dtype = "float32" if mixed else dtype
    qwen3 = build_qwen3(config.model, getattr(torch, first_dtype), device)
    if config.weights:
        load_qwen3(qwen3, config.weights)
    else:
        drawn = Model(config.model)
        initialise(drawn, config.seed, SPREAD)
        unmatched = qwen3.load_state_dict(drawn.state_dict(), strict=False)
        tied = {"lm_head.weight"} if config.model.tie_word_embeddings else set()
        assert not unmatched.unexpected_keys, f"transformers has no {unmatched.unexpected_keys}"
        assert set(unmatched.missing_keys) <= tied, f"the oracle would keep its own {unmatched.missing_keys}"
    if disturbed.moved_by:
        _move(qwen3.parameters(), disturbed.moved_by)
    masters = None
    if mixed:
        masters = {name: weight.detach().clone() for name, weight in qwen3.named_parameters()}
        qwen3.to(dtype=getattr(torch, dtype))
    dropout = (config.dropout, config.seed)
    return DenseSubject(qwen3, config.optimizer, config.batch.micro_batch_size, disturbed.shifts, masters, dropout)


def _dense_run(config: ValidateConfig, dtype: str, device: torch.device, disturbed: Disturbance = UNDISTURBED) -> Run:
    look = partial(_look, f"transformers{disturbed.name} in {dtype}", config.log_interval)
    subject = _dense_subject(config, dtype, device, disturbed)
    return record(subject, partial(batch_of, config), plan_of(config), look)


@lru_cache(maxsize=8)
def dense_runs(config: ValidateConfig, device: torch.device) -> tuple[Run, Run]:
    """The oracle, and transformers' model in the chosen dtype; cached, since many topologies are judged by one oracle.

    ``config`` has no mesh and no strategy in it, so that the cache finds it again.
    """
    oracle = _dense_run(config, "float64", device)
    if not oracle.logits[0].any():
        raise TronError("every logit is 0 with these weights, and nothing is proven by comparing zeros", "change --weights")
    return oracle, oracle if config.compute_dtype == "float64" else _dense_run(config, config.compute_dtype, device)


@lru_cache(maxsize=2)
def _shifted_run(config: ValidateConfig, device: torch.device) -> Run:
    shifts = rounding_shifts(*dense_runs(config, device))
    return _dense_run(config, "float64", device, Disturbance(", gradients shifted by their rounding,", shifts))


@lru_cache(maxsize=2)
def _moved_run(config: ValidateConfig, device: torch.device) -> Run:
    by = 4 * torch.finfo(torch.float64).eps
    return _dense_run(config, "float64", device, Disturbance(", weights moved by rounding,", moved_by=by))


def judge(config: ValidateConfig, ours: Run, copies_differ: list[str], device: torch.device) -> Report:
    """Judge a parallel run; where it is beyond a limit, see first what rounding alone does to this model and this training.

    Raises: TronError when rounding alone makes another model of it, so that neither PASS nor FAIL would mean anything.
    """
    ours_alone = {"mesh": MeshConfig(), "strategy": StrategyConfig(), "pipeline": PipelineConfig()}
    bare = {**ours_alone, "json_file": None, "trace": None, "atol": None, "rtol": None}
    reference, dtype = config.model_copy(update=bare), getattr(torch, config.compute_dtype)
    oracle, dense = dense_runs(reference, device)
    kept_as = getattr(torch, config.master_dtype or config.compute_dtype)
    report = Judge(oracle, dense, ours, dtype, config.atol, config.rtol, kept_as=kept_as).report(copies_differ)
    if report.rule == "noise floor" and report.only_after_adamw:
        shifted = _shifted_run(reference, device)
        report = Judge(oracle, dense, ours, dtype, shifted=shifted, kept_as=kept_as).report(copies_differ)
    if report.rule == "exact" and not report.passed:
        report = Judge(oracle, dense, ours, dtype, moved=_moved_run(reference, device)).report(copies_differ)
    hopeless = report.hopeless(torch.finfo(dtype).eps) if report.rule != "tolerance" else None
    if hopeless:
        raise TronError(
            f"rounding alone moves {hopeless.name} by {hopeless.floor:.1%} here, so neither PASS nor FAIL would mean anything",
            "lower --learning-rate or --optimizer-steps, or use a wider --dtype",
        )
    return report


def parallel_run(config: ValidateConfig, mesh: Mesh, device: torch.device) -> tuple[Run, list[str]]:
    """What our model shows on a mesh, and the names of parameters whose copies came apart."""
    model = build_model(config, mesh, device)
    if config.weights:
        load_weights(model, config.weights)
    else:
        initialise(model, config.seed, SPREAD)
    look = partial(_look, f"minimind-tron in {describe_numbers(config)}", config.log_interval)
    run = record(ParallelSubject(model, config), partial(batch_of, config), plan_of(config), look)
    return run, differing_copies(model)


def validate(config: ValidateConfig, mesh: Mesh, device: torch.device) -> Report:
    """Run both sides and judge them; every rank gets the report.

    Cost: rank 0 runs the dense model in float64, and in the chosen dtype if that is another, while the others wait.
    """
    ours, copies_differ = parallel_run(config, mesh, device)
    verdict: Report | TronError | None = None
    if mesh.rank == 0:
        try:
            # Threads that share a small matrix mostly wait for each other.
            with all_cores() if config.model.num_parameters > SMALL else nullcontext():
                verdict = judge(config, ours, copies_differ, device)
        except TronError as error:
            verdict = error
    verdict = share(verdict, mesh)
    if isinstance(verdict, TronError):
        raise verdict
    assert verdict is not None, "rank 0 came to no verdict"
    return verdict


def _line(finding: Finding) -> str:
    floor = "" if finding.ratio is None else f"{finding.floor:11.2e}{finding.ratio:8.2f}"
    mark = "" if finding.passed else "   <-- FAIL"
    return f"  {finding.name:<52}{finding.mean:11.2e}{finding.largest:11.2e}{finding.error:11.2e}{floor}{mark}"


_SECTIONS = {
    "logits": "forward",
    "gradient": "gradients, whole and raw",
    "trained logits": "logits of batch 0 under AdamW",
    "parameter": "parameters after the last step",
}


def show(report: Report) -> None:
    """Print every finding, then the verdict with the rule that decided."""
    floor = "" if report.rule != "noise floor" else f"{'dense':>11}{'ratio':>8}"
    section = None
    for finding in report.findings:
        if finding.kind in _SECTIONS and _SECTIONS[finding.kind] != section:
            section = _SECTIONS[finding.kind]
            say(f"{section:<54}{'mean |a-b|':>11}{'max |a-b|':>11}{'relative':>11}{floor}")
        say(_line(finding))
    for name in report.copies_differ:
        say(f"  copies of {name} differ between ranks   <-- FAIL")
    say(verdict(report))


def verdict(report: Report) -> str:
    """PASS or FAIL, the rule, and the finding nearest to its limit or first beyond it."""
    if report.passed:
        return f"PASS  {report.rule}: nearest to its limit is {_against_limit(report.worst)}"
    failed = [finding for finding in report.findings if not finding.passed]
    first = _against_limit(failed[0]) if failed else f"copies of {report.copies_differ[0]} differ between ranks"
    copies = f" and {len(report.copies_differ)} parameters' copies" if report.copies_differ else ""
    worst = f", worst {_against_limit(report.worst)}" if len(failed) > 1 else ""
    return f"FAIL  {report.rule}: {len(failed)} of {len(report.findings)} checks{copies}, first {first}{worst}"


def _against_limit(finding: Finding) -> str:
    if finding.floor and finding.ratio is None and finding.limit > EXACT:
        moved = f"rounding alone moves it by {finding.floor:.2e}"
        return f"{finding.name}, {finding.error:.2e}; {moved} (limit {finding.limit:.2e})"
    if finding.ratio is not None:
        return f"{finding.name}, {finding.ratio:.2f} times the noise floor {finding.floor:.2e} (limit {finding.limit})"
    if finding.kind == "parameter" and math.isinf(finding.error):
        return f"{finding.name}, missing"
    return f"{finding.name}, {finding.error:.2e} (limit {finding.limit:.2e})"


def check(config: ValidateConfig) -> None:
    """Refuse weights that do not fit the model, without memory for either.

    Raises: TronError.
    """
    if config.weights:
        load_weights(Model(config.model, device="meta"), config.weights)


def run(config: ValidateConfig, world: World) -> Report:
    """Validate, print, and write the report."""
    mesh = build_mesh(config.mesh, world.rank, world.size, world.timeout_s)
    settle(config.check_before_start, mesh)
    degrees = " x ".join(f"{name} {size}" for name, size in config.mesh.degrees.items())
    say(f"minimind-tron validate: {config.model.num_parameters:,} parameters, {describe_numbers(config)}, on {world.device}")
    say(f"mesh {degrees}; {describe_switches(config.mesh, config.strategy)}")
    if pipeline := describe(config.model, config.pipeline, config.mesh.pp_size):
        say(f"pipeline {pipeline}; {config.passes} microbatches")
    report = validate(config, mesh, world.device)
    show(report)
    if config.json_file and mesh.rank == 0:
        config.json_file.write_text(json.dumps({"config": flatten(config), **report.as_dict()}, indent=1) + "\n")
    return report
