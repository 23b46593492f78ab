"""validate against transformers' Qwen3: correct topologies pass at 1e-10, and every planted bug is caught."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minimind_tron import collectives, model, optim
from minimind_tron.commands import validate
from minimind_tron.config import BatchConfig, ModelConfig, OptimizerConfig
from minimind_tron.errors import TronError
from minimind_tron.interop import save_hugging_face
from minimind_tron.judge import EXACT, Judge, Report, Run
from minimind_tron.mesh import Mesh
from minimind_tron.model import Model
from minimind_tron.parallel import vocab
from minimind_tron.run_config import ValidateConfig
from minimind_tron.runtime import World
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.covering import pairwise
from tests.meshes import tp_mesh
from tests.proving import Pools, name_of, on_rank, without_sums

SEAMS = {
    "tp": {"sequence_parallel": False},
    "sp": {"sequence_parallel": True, "sp_recompute": True},
    "sp, gathered input kept": {"sequence_parallel": True, "sp_recompute": False},
}
LISTED: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "seams": tuple(SEAMS),
    "vocab_parallel": (False, True),
    "tied": (True, False),
    "kv_heads": (8, 4, 2, 1),
    "asynchronous": (False, True),
}
ALSO: dict[str, tuple[Any, ...]] = {
    "bias": (False, True),
    "vocab_size": (61, 64),
    "seq_len": (15, 16),
    "samples": (2, 4, 6),
}


def config_of(
    tp: int = 1,
    seams: str = "tp",
    vocab_parallel: bool = False,
    tied: bool = True,
    kv_heads: int = 4,
    asynchronous: bool = False,
    bias: bool = False,
    vocab_size: int = 61,
    seq_len: int = 15,
    samples: int = 4,
    steps: int = 3,
    **others: Any,
) -> ValidateConfig:
    """A tiny model with uneven labels, in microbatches of 2."""
    return ValidateConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            attention_bias=bias,
        ),
        mesh=MeshConfig(tp_size=tp),
        strategy=StrategyConfig(vocab_parallel=vocab_parallel, async_communication=asynchronous, **SEAMS[seams]),
        batch=BatchConfig(seq_len=seq_len, micro_batch_size=2, global_batch_size=samples),
        optimizer_steps=steps,
        log_interval=max(1, steps // 2),
        **others,
    )


@pytest.mark.parametrize("row", pairwise(LISTED | ALSO), ids=name_of)
def test_every_pair_of_settings_is_the_dense_model(pool: Pools, row: dict[str, Any]) -> None:
    report = pool(row["tp"]).run(on_rank, config_of(**row))[0]
    assert report.passed, validate.verdict(report)


@pytest.mark.full
@pytest.mark.parametrize("row", [dict(zip(LISTED, v, strict=True)) for v in itertools.product(*LISTED.values())], ids=name_of)
def test_the_whole_product_over_20_steps(pool: Pools, row: dict[str, Any]) -> None:
    report = pool(row["tp"]).run(on_rank, config_of(**row, steps=20))[0]
    assert report.passed, validate.verdict(report)


CORNERS: dict[str, dict[str, Any]] = {
    "a vocab smaller than tp, some ranks hold padding only": {"tp": 4, "vocab_parallel": True, "vocab_size": 2},
    "a vocab whose last rank holds padding only": {"tp": 4, "vocab_parallel": True, "vocab_size": 9, "seams": "sp"},
    "two positions on four ranks": {"tp": 4, "seams": "sp", "seq_len": 2, "vocab_parallel": True},
    "three positions, asynchronous": {"tp": 2, "seams": "sp", "seq_len": 3, "asynchronous": True},
    "one sample": {"tp": 2, "seams": "sp", "samples": 2, "vocab_parallel": True},
    "no clipping": {"tp": 2, "optimizer": OptimizerConfig(clip_norm=0.0)},
    "20 steps": {"tp": 2, "seams": "sp", "vocab_parallel": True, "steps": 20, "kv_heads": 1, "bias": True},
}


@pytest.mark.parametrize("row", CORNERS.values(), ids=CORNERS.keys())
def test_corner_cases_are_the_dense_model(pool: Pools, row: dict[str, Any]) -> None:
    report = pool(row["tp"]).run(on_rank, config_of(**row))[0]
    assert report.passed, validate.verdict(report)


def test_every_rank_gets_the_same_verdict(pool: Pools) -> None:
    reports = pool(2).run(on_rank, config_of(tp=2))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_stay_within_the_noise_floor(pool: Pools, dtype: str) -> None:
    row = {"tp": 2, "seams": "sp", "vocab_parallel": True, "asynchronous": True, "vocab_size": 64, "seq_len": 32}
    report = pool(2).run(on_rank, config_of(**row, steps=4, dtype=dtype))[0]
    assert report.rule == "noise floor"
    assert report.passed, validate.verdict(report)


# Planted bugs: each is put in on every rank, and validate must say FAIL.


def row_bias_on_every_rank() -> Any:
    def row(self: Any, x: Any, linear: Any) -> Any:
        return self.leave(F.linear(x, linear.weight, linear.bias), self.axis)

    return mock.patch("minimind_tron.parallel.linear.Seams.row", row)


def padding_in_the_softmax() -> Any:
    return mock.patch.object(vocab, "_real", lambda logits, real_columns: vocab.wide(logits).clone())


def full_logits_into_the_cut_loss() -> Any:
    right = vocab.cross_entropy

    def wrong(logits: Any, labels: Any, cut: Any, vocab_size: int) -> Any:
        whole = collectives.gather_in(logits.movedim(-1, 0).contiguous(), cut.axis).movedim(0, -1)
        return right(whole, labels, cut, vocab_size)

    return mock.patch.object(vocab, "cross_entropy", wrong)


def copies_counted_in_the_norm() -> Any:
    return mock.patch.object(optim, "counts_here", return_value=True)


def label_lost_at_the_border() -> Any:
    right = model.sequence.own

    def wrong(x: Any, axis: Any) -> Any:
        mine = right(x, axis).clone()
        if not x.is_floating_point() and axis.rank == 0 and (x == vocab.IGNORED).any():
            mine[-1] = vocab.IGNORED
        return mine

    return mock.patch.object(model.sequence, "own", wrong)


BUGS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "q/k-norm gradient not summed over tp": (lambda: without_sums("q_norm", "k_norm"), {}, "q_norm"),
    "norm gradient not summed under SP": (lambda: without_sums("layernorm", "model.norm"), {"seams": "sp"}, "norm"),
    "row bias added tp times": (row_bias_on_every_rank, {"bias": True}, "logits"),
    "padded vocab columns left in the softmax": (padding_in_the_softmax, {"vocab_parallel": True}, "loss"),
    "full logits fed to the vocab-parallel loss": (full_logits_into_the_cut_loss, {"vocab_parallel": True}, "loss"),
    "a shared kv head's gradient not summed": (lambda: without_sums("k_proj", "v_proj"), {"kv_heads": 1}, "k_proj"),
    "copies counted once per rank in the norm": (copies_counted_in_the_norm, {}, "gradient norm"),
    "a label lost at the border of two shards": (label_lost_at_the_border, {"seams": "sp"}, "loss"),
    "embedding gradient not summed under SP without VP": (lambda: without_sums("embed"), {"seams": "sp"}, "embed"),
}


def with_bug(bug: str, config: ValidateConfig) -> Report:
    with BUGS[bug][0]():
        return on_rank(config)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(pool: Pools, bug: str) -> None:
    _, row, named = BUGS[bug]
    config = config_of(**{"tp": 2, "vocab_size": 61, "seq_len": 16, **row})
    clean = pool(2).run(on_rank, config)[0]
    assert clean.passed, f"without the bug: {validate.verdict(clean)}"
    report = pool(2).run(with_bug, bug, config)[0]
    assert not report.passed
    failed = [finding.name for finding in report.findings if not finding.passed]
    assert any(named in name for name in failed), f"{named} is not among {failed[:5]}"


def without_weight_decay(config: ValidateConfig) -> Report:
    with mock.patch.object(optim, "decays", return_value=False):
        return on_rank(config)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_wrong_optimizer_is_caught_although_its_noise_floor_is_measured_twice(pool: Pools, dtype: str) -> None:
    report = pool(2).run(without_weight_decay, config_of(tp=2, vocab_size=64, seq_len=32, dtype=dtype))[0]
    assert report.only_after_adamw
    assert {finding.kind for finding in report.findings if not finding.passed} >= {"parameter", "parameters", "trained logits"}


def drift_one_copy(config: ValidateConfig) -> list[str]:
    mesh = tp_mesh()
    built = Model(config.model, mesh, config.strategy, dtype=torch.float64)
    with torch.no_grad():
        for weight in built.parameters():
            weight.zero_()
        built.model.norm.weight[3] = 1e-300 * mesh.tp.rank
        built.model.layers["0"].self_attn.k_proj.weight[0, 0] = mesh.tp.rank
    return validate.differing_copies(built)


def test_copies_that_come_apart_are_named(pool: Pools) -> None:
    shared_head, own_heads = config_of(tp=2, kv_heads=1), config_of(tp=2, kv_heads=2)
    assert pool(2).run(drift_one_copy, shared_head)[0] == ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    assert pool(2).run(drift_one_copy, own_heads)[0] == ["model.norm.weight"]


# The judge by itself: what passes, what fails, and by which rule.


@lru_cache(maxsize=1)
def a_run() -> Run:
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Run(
        losses=[3.0],
        logits={0: tensor(2, 3, 5), 2: tensor(2, 3, 5)},
        gradients={"big": tensor(50, 50), "small": tensor(3) * 1e-9},
        gradient_norm=float(tensor(50, 50).norm()),
        parameters={"big": tensor(50, 50), "small": tensor(3)},
    )


def judged(ours: Run, dtype: torch.dtype = torch.float64, atol: float | None = None, rtol: float | None = None) -> Report:
    return Judge(a_run(), a_run(), ours, dtype, atol, rtol).report([])


def changed(**fields: Any) -> Run:
    return dataclasses.replace(a_run(), **fields)


def test_equal_runs_pass() -> None:
    report = judged(a_run())
    assert report.passed
    assert all(finding.error == 0 for finding in report.findings)
    assert [finding.kind for finding in report.findings].count("gradient") == 2


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        (lambda: changed(logits={**a_run().logits, 0: a_run().logits[0] * (1 + 1e-9)}), "logits"),
        (lambda: changed(losses=[3.0 + 1e-9]), "loss"),
        (lambda: changed(losses=[float("nan")]), "loss"),
        (lambda: changed(gradients={**a_run().gradients, "big": a_run().gradients["big"] * (1 + 1e-9)}), "big"),
        (lambda: changed(gradients={"big": a_run().gradients["big"]}), "small"),
        (lambda: changed(gradients={**a_run().gradients, "big": a_run().gradients["big"][:-1]}), "big"),
        (lambda: changed(gradients={**a_run().gradients, "small": torch.full((3,), float("nan"))}), "small"),
        (lambda: changed(gradient_norm=a_run().gradient_norm * (1 + 1e-9)), "gradient norm"),
        (lambda: changed(logits={0: a_run().logits[0]}), "logits after step 2"),
        (lambda: changed(parameters={**a_run().parameters, "small": a_run().parameters["small"] + 1e-9}), "small"),
        (lambda: changed(parameters={"big": a_run().parameters["big"]}), "small"),
    ],
)
def test_a_difference_a_nan_and_a_missing_tensor_fail(ours: Callable[[], Run], named: str) -> None:
    report = judged(ours())
    assert not report.passed
    assert named in {finding.name for finding in report.findings if not finding.passed}
    assert validate.verdict(report).startswith("FAIL")


def test_a_tiny_gradient_is_judged_against_the_norm_of_all() -> None:
    off = a_run().gradients["small"] * (1 + 1e-6)
    finding = next(f for f in judged(changed(gradients={**a_run().gradients, "small": off})).findings if f.name == "small")
    assert finding.passed
    assert 0 < finding.error < EXACT


def test_differing_copies_fail() -> None:
    report = Judge(a_run(), a_run(), a_run(), torch.float64, None, None).report(["model.norm.weight"])
    assert not report.passed
    assert "model.norm.weight" in validate.verdict(report)


def test_the_noise_floor_rule_takes_ratios() -> None:
    eps = torch.finfo(torch.float32).eps

    def off(times: float) -> Run:
        return changed(logits={**a_run().logits, 0: a_run().logits[0] * (1 + times * eps)})

    assert judged(off(1.4), torch.float32).passed
    report = judged(off(1.6), torch.float32)
    assert [finding.name for finding in report.findings if not finding.passed] == ["logits"]
    assert report.rule == "noise floor"


def test_tolerances_replace_the_rule_and_the_verdict_says_so() -> None:
    off = changed(losses=[3.0 + 1e-6])
    assert not judged(off).passed
    assert judged(off, atol=2e-6).passed
    assert judged(off, rtol=1e-6).passed
    assert not judged(off, atol=5e-7).passed
    assert "tolerance" in validate.verdict(judged(off, atol=2e-6))


# The command.


def command(config: ValidateConfig) -> tuple[int, list[str]]:
    lines: list[str] = []
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), backend=None)
    with mock.patch.object(validate, "say", lambda *args: lines.append(" ".join(map(str, args)))):
        return validate.run(config, world).exit_code, lines


def test_the_report_names_every_parameter_and_ends_with_the_verdict(tmp_path: Path) -> None:
    code, lines = command(config_of(json_file=tmp_path / "report.json"))
    assert code == 0
    assert lines[-1].startswith("PASS  exact")
    for name, _ in Model(config_of().model, Mesh()).named_parameters():
        assert sum(line.split()[:1] == [name] for line in lines) == 2, "once for its gradient, once for its value"
    assert sum("logits after step" in line for line in lines) == 3
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["passed"]
    assert written["config"]["hidden_size"] == 64
    assert len(written["findings"]) > 50


def test_without_backward_only_the_forward_is_compared() -> None:
    code, lines = command(config_of(check_backward=False))
    assert code == 0
    assert not any("embed_tokens" in line or "after step" in line for line in lines)


def test_a_failure_has_exit_code_1() -> None:
    with mock.patch.object(validate, "differing_copies", return_value=["model.norm.weight"]):
        code, lines = command(config_of())
    assert code == 1
    assert lines[-1].startswith("FAIL")


def test_labels_are_uneven_and_the_last_always_counts() -> None:
    batch = validate.synthetic_batch(0, 4, 40, 61, 1)
    shares = (batch.labels_BS == vocab.IGNORED).double().mean(1)
    assert shares.max() > 0.6
    assert shares.min() == 0
    assert (batch.labels_BS[:, -1] != vocab.IGNORED).all()
    counted = batch.labels_BS[:, :-1] != vocab.IGNORED
    assert torch.equal(batch.labels_BS[:, :-1][counted], batch.ids_BS[:, 1:][counted])


def test_one_position_is_refused() -> None:
    with pytest.raises(TronError, match="--seq-len 2"):
        config_of(seq_len=1)


# What a stranger found: ill-conditioned training, weights that prove nothing, a report that cannot be written.

TINY = {"kv_heads": 1, "seq_len": 7, "samples": 2}


def trained_hard(steps: int, **others: Any) -> ValidateConfig:
    return config_of(**TINY, steps=steps, optimizer=OptimizerConfig(learning_rate=0.02), **others)


def test_training_that_amplifies_rounding_is_not_called_a_bug() -> None:
    report = on_rank(trained_hard(60))
    assert report.passed, validate.verdict(report)


def test_training_that_makes_another_model_of_rounding_is_refused() -> None:
    with pytest.raises(TronError, match=r"rounding alone moves .* neither PASS nor FAIL"):
        on_rank(trained_hard(200))


def test_a_failure_before_training_stands_although_training_loses_itself() -> None:
    lost = changed(logits={**a_run().logits, 2: a_run().logits[2] * 2})
    wrong = changed(logits={**lost.logits, 0: a_run().logits[0] * 2})
    eps = torch.finfo(torch.float32).eps
    hopeless = Judge(a_run(), lost, lost, torch.float32).report([])
    assert (found := hopeless.hopeless(eps)) is not None
    assert found.name == "logits after step 2"
    assert Judge(a_run(), lost, wrong, torch.float32).report([]).hopeless(eps) is None


def moved_limit_with_bug(config: ValidateConfig) -> Report:
    with without_sums("q_norm", "k_norm"):
        return on_rank(config)


def test_a_bug_is_caught_although_the_exact_rule_looks_at_conditioning(pool: Pools) -> None:
    report = pool(2).run(moved_limit_with_bug, config_of(tp=2))[0]
    failed = [finding for finding in report.findings if not finding.passed]
    assert failed[0].limit == EXACT
    assert failed[0].floor is not None, "the second look was taken"


def refused(config: ValidateConfig) -> str:
    try:
        on_rank(config)
    except TronError as error:
        return f"{error.what}|{error.fix}"
    return "not refused"


def saved(folder: Path, value: float) -> Path:
    built = Model(config_of().model)
    with torch.no_grad():
        for weight in built.parameters():
            weight.fill_(value)
    save_hugging_face(built, folder)
    return folder


def test_weights_that_prove_nothing_are_refused_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    zeros, nans = saved(tmp_path / "zeros", 0.0), saved(tmp_path / "nans", float("nan"))
    assert all("every logit is 0" in text for text in pool(2).run(refused, config_of(tp=2, weights=zeros)))
    assert all("NaN or infinite" in text for text in pool(2).run(refused, config_of(tp=2, weights=nans)))


def test_a_report_is_json_whatever_it_found() -> None:
    report = judged(changed(losses=[float("nan")]))
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("path", [Path("/nowhere/report.json"), Path("/")])
def test_a_report_that_cannot_be_written_is_refused_first(path: Path) -> None:
    with pytest.raises(TronError, match="--json"):
        config_of(json_file=path)
