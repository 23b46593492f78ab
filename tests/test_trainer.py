"""The loop and the command around it: one run on every mesh, and everything it writes, says and refuses."""

import contextlib
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_tron import trainer
from minimind_tron.commands.train import TrainResult, beginning, claim_output, heldout_text, run, take_sample
from minimind_tron.config import BatchConfig
from minimind_tron.config_files import from_toml
from minimind_tron.errors import TronError
from minimind_tron.mesh import build_mesh
from minimind_tron.model import Model, build_model, initialise
from minimind_tron.optim import build_adamw, learning_rate_at, set_learning_rate
from minimind_tron.parallel.segments import Segment
from minimind_tron.run_config import TrainConfig
from minimind_tron.runtime import World
from minimind_tron.step import StepResult, train_step
from minimind_tron.tokenizer import Tokenizer, load_tokenizer
from minimind_tron.tokens import Samples, batch_at, load_corpus
from minimind_tron.topology import MeshConfig, PipelineConfig
from minimind_tron.trainer import (
    Display,
    Heldout,
    Metrics,
    References,
    Trained,
    Trainer,
    count_steps,
    measure_heldout,
    show,
    train,
    unigram_entropy,
)
from tests.pool import pool

# 257 rows and 13 tokens: neither divides by 2, so vocab and sequence are padded.
MODEL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
BATCH = {"seq_len": 13, "global_batch_size": 4, "micro_batch_size": 2}
SWITCHES = {"sequence_parallel": True, "vocab_parallel": True}
NO_REFERENCES = References(0.0, 0.0)


def text_file(folder: Path) -> Path:
    """Some text with structure, so that there is something to learn."""
    path = folder / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(120)))
    return path


def config_for(data: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": MODEL,
        "batch": BATCH,
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "data": data,
        "steps": 6,
        "log_interval": 1,
        "eval_interval": 4,
        "eval_batches": 3,
        "sample_tokens": 12,
    }
    return TrainConfig(**values | changes)


def build(config: TrainConfig) -> Model:
    size = config.mesh.world_size
    mesh = build_mesh(config.mesh, dist.get_rank() if size > 1 else 0, size)
    model = build_model(config, mesh, torch.device("cpu"))
    initialise(model, config.seed)
    return model


def here(config: TrainConfig) -> World:
    size = config.mesh.world_size
    rank = dist.get_rank() if size > 1 else 0
    return World(rank, size, rank, size, torch.device("cpu"), "gloo" if size > 1 else None)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_and_report(config: TrainConfig, metrics: Path) -> tuple[float, Heldout]:
    """Every rank's last losses; the metrics of rank 0 are in the file."""
    model = build(config)
    assert config.data is not None
    corpus = load_corpus(config.data, Tokenizer(None), config.batch.seq_len)
    done = train(model, corpus, config, NO_REFERENCES, metrics if model.mesh.rank == 0 else None)
    return done.loss, done.heldout


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp_size": 2}, "strategy": SWITCHES},
    "tp, async": {"mesh": {"tp_size": 2}, "strategy": {**SWITCHES, "async_communication": True}},
    "pp, 1f1b": {"mesh": {"pp_size": 2}},
    "pp, zb-h1": {"mesh": {"pp_size": 2}, "pipeline": {"pp_schedule": "zb-h1"}},
    "cp, ring": {"mesh": {"cp_size": 2}, "strategy": {"cp_comm_type": "ring"}, "sample_tokens": None},
    "cp, gathered": {"mesh": {"cp_size": 2}, "strategy": {"cp_comm_type": "all_gather"}, "sample_tokens": None},
    "cp, a2a": {"mesh": {"cp_size": 2}, "strategy": {"cp_comm_type": "a2a"}, "sample_tokens": None},
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-9), ("float32", 1e-4)])
def test_fifty_steps_on_two_ranks_are_those_of_one_process(tmp_path: Path, dtype: str, within: float, topology: str) -> None:
    alone = config_for(text_file(tmp_path), dtype=dtype, steps=50, eval_interval=25)
    split = config_for(alone.data, dtype=dtype, steps=50, eval_interval=25, **TOPOLOGIES[topology])
    ((loss, heldout),) = pool(1).run(train_and_report, alone, tmp_path / "one.jsonl")
    both = pool(2).run(train_and_report, split, tmp_path / "two.jsonl")
    assert both[0] == both[1], "ranks agree to the bit"
    assert both[0][0] == pytest.approx(loss, rel=within)
    assert both[0][1].nats_per_byte == pytest.approx(heldout.nats_per_byte, rel=within)
    one, two = records(tmp_path / "one.jsonl"), records(tmp_path / "two.jsonl")
    assert len(one) == len(two) == 1 + 50 + 2
    for a, b in zip(one[1:], two[1:], strict=True):
        for name in {"loss", "gradient_norm", "heldout_loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=within * (10 if name == "gradient_norm" else 1)), (name, a["step"])
        assert (a["step"], a.get("learning_rate"), a.get("tokens")) == (b["step"], b.get("learning_rate"), b.get("tokens"))
    assert one[50]["loss"] < one[1]["loss"] - 1, "a model that learned nothing would agree as well"


def test_metrics_have_a_line_per_interval_and_measurement(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path), steps=10, log_interval=4)
    train_and_report(config, tmp_path / "metrics.jsonl")
    first, *lines = records(tmp_path / "metrics.jsonl")
    assert set(first) == {"bytes_per_token", "uniform", "byte_unigram"}
    trained = [line for line in lines if "loss" in line]
    measured = [line for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in trained] == [1, 4, 8, 10]
    assert [line["step"] for line in measured] == [4, 8, 10]
    assert [line["tokens"] for line in trained] == [52, 208, 416, 520]
    names = ["step", "loss", "gradient_norm", "learning_rate", "tokens", "seconds", "tokens_per_s"]
    assert all(list(line) == names for line in trained)
    assert [line["learning_rate"] for line in trained] == [learning_rate_at(s - 1, 10, config.optimizer) for s in (1, 4, 8, 10)]
    assert all(line["tokens_per_s"] > 0 for line in trained)
    assert all(line["heldout_loss"] == line["heldout_nats_per_byte"] for line in measured), "a byte a token"


def test_metrics_are_flushed_line_by_line_and_know_no_nan(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(step=1)
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1}]
    with pytest.raises(ValueError, match="JSON"):
        metrics.write(loss=math.nan)
    metrics.close()
    metrics.close()


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"), [(1, 8, 2), (1, 9, 3), (2, 9, 5), (0.5, 8, 1), (0.01, 8, 1), (0.7, 40, 7), (0.07, 400, 7)]
)
def test_epochs_become_steps(tmp_path: Path, epochs: float, samples: int, steps: int) -> None:
    assert count_steps(config_for(text_file(tmp_path), steps=None, epochs=epochs), samples) == steps


def test_steps_default_to_a_thousand(tmp_path: Path) -> None:
    assert count_steps(config_for(text_file(tmp_path), steps=None), 8) == 1000
    assert count_steps(config_for(text_file(tmp_path), steps=7), 8) == 7


def test_an_epoch_sees_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(text_file(tmp_path), steps=None, epochs=1, eval_interval=1000, log_interval=1000)
    corpus = load_corpus(config.data, Tokenizer(None), 13)
    seen: list[tuple[int, ...]] = []

    def spy(model: Model, optimizer: Any, batch: Any, *rest: Any) -> StepResult:
        seen.extend(tuple(row.tolist()) for row in batch.ids_BS)
        return StepResult(1.0, 1, 1.0)

    monkeypatch.setattr(trainer, "train_step", spy)
    done = train(build(config), corpus, config, NO_REFERENCES, None)
    assert done.steps == math.ceil(len(corpus.train) / 4)
    assert len(seen) == done.steps * 4
    assert sorted(seen[: len(corpus.train)]) == sorted(tuple(corpus.train.sample(i)[0].tolist()) for i in range(len(corpus.train)))


def with_empty_samples(samples: Samples, every: int) -> Samples:
    """Of every so many samples the first loses all its labels."""

    def read(place: int) -> np.ndarray:
        return samples.read(place)[: 1 if place % every == 0 else None]

    return replace(samples, read=read)


def test_a_step_without_labels_changes_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(text_file(tmp_path), batch={"seq_len": 13, "micro_batch_size": 1}, steps=12, dtype="float64")
    corpus = load_corpus(config.data, Tokenizer(None), 13)
    corpus = replace(corpus, train=with_empty_samples(corpus.train, 3))
    model, byhand = build(config), build(config)
    done = train(model, corpus, config, NO_REFERENCES, tmp_path / "metrics.jsonl")
    optimizer, empty, tokens = build_adamw(byhand, config.optimizer), [], 0
    for step in range(12):
        batch = batch_at(corpus.train, step, 1, config.seed)
        if (batch.labels_BS == -100).all():
            empty.append(step + 1)
            continue
        tokens += int((batch.labels_BS != -100).sum())
        set_learning_rate(optimizer, learning_rate_at(step, 12, config.optimizer))
        train_step(byhand, optimizer, batch, 1, config.optimizer.clip_norm)
    assert 0 < len(empty) < 12, "the test needs steps of both kinds"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), byhand.parameters(), strict=True))
    assert (done.unlabelled, done.skipped, done.tokens) == (len(empty), 0, tokens)
    skipped = [line for line in records(tmp_path / "metrics.jsonl") if "skipped" in line]
    assert [line["step"] for line in skipped] == empty
    said = capsys.readouterr().out
    assert all(f"step {step}: no valid label in the whole batch, nothing was changed" in said for step in empty)


def test_a_run_without_any_label_leaves_the_model_alone(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path), steps=3)
    corpus = load_corpus(config.data, Tokenizer(None), 13)
    model = build(config)
    done = train(model, replace(corpus, train=with_empty_samples(corpus.train, 1)), config, NO_REFERENCES, None)
    assert (done.unlabelled, done.skipped, done.tokens) == (3, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build(config).parameters(), strict=True))


def diverge(config: TrainConfig, metrics: Path) -> str:
    with pytest.raises(TronError) as stopped:
        train_and_report(config, metrics)
    return str(stopped.value)


@pytest.mark.parametrize("size", [1, 2])
def test_divergence_stops_every_rank_with_the_step(tmp_path: Path, size: int) -> None:
    """The first update makes infinite numbers; every step after it is skipped, and the third in a row ends the run."""
    wild = {"learning_rate": 1e30, "clip_norm": 0.0}
    config = config_for(text_file(tmp_path), optimizer=wild, mesh=MeshConfig(tp_size=size), max_skipped=3, eval_interval=100)
    said = pool(size).run(diverge, config, tmp_path / "metrics.jsonl")
    assert said == [said[0]] * size
    assert "step 4: loss" in said[0]
    assert "gradient norm nan; 3 steps in a row were skipped" in said[0]
    assert "--learning-rate" in said[0]
    lines = records(tmp_path / "metrics.jsonl")
    assert [line.get("step") for line in lines] == [None, 1, 2, 3, 4]
    assert ["skipped" in line for line in lines] == [False, False, True, True, True]


OVERFLOWS = {"dp": MeshConfig(dp_size=2), "tp": MeshConfig(tp_size=2), "pp": MeshConfig(pp_size=2), "cp": MeshConfig(cp_size=2)}


def train_with_overflows(config: TrainConfig, steps: tuple[int, ...], value: float) -> tuple[Trained, bool, int]:
    """A run in which, in some steps, one element of one gradient of the last rank overflows before anything is summed.

    Also whether weights and optimizer states are those of a run that never met these steps, and how many updates were made.
    """
    corpus = load_corpus(config.data, Tokenizer(None), 13)
    model, spared = build(config), build(config)
    met, right = 0, model.masters.take

    def take(segment: Segment) -> None:
        if met in steps and segment.name == "block 1" and model.mesh.rank == model.mesh.size - 1:
            assert segment.weights[0].grad is not None
            segment.weights[0].grad.view(-1)[0] = value
        right(segment)

    def stepped(*args: Any, **kwargs: Any) -> StepResult:
        nonlocal met
        met += 1
        with mock.patch.object(model.masters, "take", take):
            return train_step(*args, **kwargs)

    with mock.patch.object(trainer, "train_step", stepped):
        running = Trainer(model, corpus, config, Metrics(None), Display())
        done = running.run()
    adamw = build_adamw(spared, config.optimizer)
    for step in range(config.steps or 0):
        if step + 1 not in steps:
            set_learning_rate(adamw, learning_rate_at(step, config.steps or 0, config.optimizer))
            batch = batch_at(corpus.train, step, config.batch.samples, config.seed)
            train_step(spared, adamw, batch, config.batch.micro_batch_size, config.optimizer.clip_norm)
    ours, theirs = model.masters.values(), spared.masters.values()
    same = all(torch.equal(value, theirs[name][0]) for name, (value, _) in ours.items())
    states = [int(state["step"]) for state in running.optimizer.state.values()]
    return done, same, max(states)


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", OVERFLOWS)
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(tmp_path: Path, axis: str, zero: int, value: float) -> None:
    config = config_for(text_file(tmp_path), mesh=OVERFLOWS[axis], strategy={"zero": zero}, sample_tokens=0, dtype="float64")
    for done, same, updates in pool(2).run(train_with_overflows, config, (2, 3, 5), value):
        assert (done.steps, done.skipped, done.unlabelled) == (6, 3, 0)
        assert same, "a skipped step changes nothing"
        assert updates == 3


def test_steps_skipped_with_good_ones_between_do_not_end_a_run(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path), mesh=OVERFLOWS["dp"], max_skipped=2, sample_tokens=0)
    assert pool(2).run(train_with_overflows, config, (1, 3, 5), math.nan)[0][0].skipped == 3
    with pytest.raises(Exception, match=r"step 4: .* 2 steps in a row were skipped"):
        pool(2).run(train_with_overflows, config, (3, 4), math.nan)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_loss_and_norm_must_both_be_numbers(loss: float, norm: float) -> None:
    assert not StepResult(loss, 5, norm).finite
    assert StepResult(1.0, 5, 1e30).finite


def test_weights_that_are_no_numbers_fail_the_measurement(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path))
    model = build(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(TronError, match="held-out loss is nan"):
        measure_heldout(model, load_corpus(config.data, Tokenizer(None), 13), config)


def test_heldout_is_the_mean_over_the_first_batches(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path), dtype="float64")
    model, corpus = build(config), load_corpus(config.data, Tokenizer(None), 13)
    corpus = replace(corpus, bytes_per_token=2.5)
    found = measure_heldout(model, corpus, config)
    ids, labels = map(torch.stack, zip(*(corpus.heldout.sample(i) for i in range(3 * 2)), strict=True))
    logits = model.logits(ids.T.contiguous())
    wanted = float(F.cross_entropy(logits.flatten(0, 1), labels.T.flatten()))
    assert found.nats_per_token == pytest.approx(wanted, rel=1e-12)
    assert found.nats_per_byte == pytest.approx(wanted / 2.5, rel=1e-12)
    assert measure_heldout(model, corpus, config) == found
    more = measure_heldout(model, corpus, config.model_copy(update={"eval_batches": 4}))
    assert more != found


def test_unigram_entropy_of_known_texts() -> None:
    assert unigram_entropy(b"aaaa") == 0.0
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aab") == pytest.approx(-(2 * math.log(2 / 3) + math.log(1 / 3)) / 3)
    assert unigram_entropy(b"") == 0.0


def test_heldout_text_is_the_bytes_of_the_labels(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("€uro " * 400, encoding="utf-8")
    heldout = load_corpus(path, Tokenizer(None), 13).heldout
    labels = sum(int((heldout.sample(i)[1] != -100).sum()) for i in range(len(heldout)))
    assert heldout_text(heldout, len(heldout), Tokenizer(None)) == path.read_bytes()[-labels:]


def test_ranks_without_metrics_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with show(5, speaks=False) as display:
        display.step(5, 1.0, 1.0)
        display.heldout(5, Heldout(1.0, 1.0))
    assert type(display) is Display
    assert capsys.readouterr().out == ""


def test_a_loop_without_metrics_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(text_file(tmp_path))
    train(build(config), load_corpus(config.data, Tokenizer(None), 13), config, NO_REFERENCES, None)
    assert capsys.readouterr().out == ""
    train(build(config), load_corpus(config.data, Tokenizer(None), 13), config, NO_REFERENCES, tmp_path / "metrics.jsonl")
    assert "step      6/6" in capsys.readouterr().out


def test_a_log_file_gets_plain_lines_at_intervals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 13.0])
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(clock))
    with show(20, speaks=True) as display:
        for step in (1, 10, 11, 20):
            display.step(step, 1.25, 4321.0)
        display.heldout(20, Heldout(3.0, 1.5))
    assert capsys.readouterr().out.splitlines() == [
        "step     10/20  loss 1.2500  4,321 tokens/s  11 s left",
        "step     20/20  loss 1.2500  4,321 tokens/s  0 s left",
        "step     20/20  held-out loss 1.5000 nats/byte",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with show(2, speaks=True) as display:
        display.step(1, 1.25, 4321.0)
        display.heldout(1, Heldout(3.0, 1.5))
        display.step(2, 1.125, 4321.0)
    shown = terminal.getvalue()
    assert all(word in shown for word in ("2/2", "loss 1.1250", "held-out 1.5000 nats/byte", "4,321 tokens/s", "0:00:00"))


def run_here(config: TrainConfig) -> TrainResult:
    return run(config, here(config))


@pytest.mark.parametrize("mesh", [{}, {"tp_size": 2}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "cp_size": 2}], ids=str)
def test_a_run_leaves_a_folder_that_others_can_use(tmp_path: Path, mesh: dict[str, int]) -> None:
    out, samples = tmp_path / "out" / "train", "cp_size" not in mesh
    config = config_for(
        text_file(tmp_path),
        output_dir=out,
        mesh=mesh,
        strategy=SWITCHES,
        steps=20,
        dtype="float64",
        sample_tokens=12 if samples else None,
    )
    results = pool(config.mesh.world_size).run(run_here, config)
    assert all(result.exit_code == 0 and result.files == results[0].files for result in results)
    assert len({(result.loss, result.sample) for result in results}) == 1
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.toml", "loss.png", "metrics.jsonl", "model"),
        *(["sample.txt"] if samples else []),
    ]
    assert {path.name for path in results[0].files} == {path.name for path in out.iterdir()}
    assert TrainConfig.model_validate(from_toml(TrainConfig, out / "config.toml").model_dump()) == config
    assert (results[0].sample is not None) == samples
    if results[0].sample is not None:
        assert (out / "sample.txt").read_text() == results[0].sample.text
        assert results[0].sample.text.startswith("def ")
    theirs = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float64)
    assert AutoTokenizer.from_pretrained(out / "model")("def")["input_ids"] == list(b"def")
    heldout = load_corpus(config.data, Tokenizer(None), 13).heldout
    ids, labels = map(torch.stack, zip(*(heldout.sample(i) for i in range(6)), strict=True))
    with torch.no_grad():
        loss = float(F.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten()))
    assert loss == pytest.approx(results[0].heldout_nats_per_token, rel=1e-6), "what was saved is what was measured"


def test_a_run_says_what_it_is_and_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(config_for(text_file(tmp_path), output_dir=tmp_path / "out", sample_tokens=0))
    said = capsys.readouterr().out
    assert result.sample is None
    assert not (tmp_path / "out" / "sample.txt").exists()
    assert f"{config_for(text_file(tmp_path)).model.num_parameters:,} parameters" in said
    assert "dp 1 x pp 1 x cp 1 x tp 1" in said
    assert said.count(f"uniform {math.log(257):.3f}, byte frequencies alone") == 2, "before and beside the last loss"
    assert f"{result.heldout_nats_per_byte:.4f} nats/byte" in said
    assert "text.txt: 1 file" in said


def test_a_run_says_its_pipeline_and_traces_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(text_file(tmp_path), output_dir=tmp_path / "out", sample_tokens=0, trace=tmp_path / "t.json")
    result = run_here(config.model_copy(update={"pipeline": PipelineConfig(pp_schedule="zb-v")}))
    said = capsys.readouterr().out
    assert "zb-v; layers 0-0 on stage 0, 1-1 on stage 0" in said
    assert "step 3: traced; bubble wall clock" in said
    assert {"t.json", "t.png", "t.html"} <= {path.name for path in result.files if path.exists()}


def test_a_run_that_cuts_the_sequence_says_how_and_traces_its_messages(tmp_path: Path) -> None:
    trace, mesh = tmp_path / "t.json", {"cp_size": 2}
    config = config_for(text_file(tmp_path), output_dir=tmp_path / "out", mesh=mesh, sample_tokens=None, trace=trace)
    said = pool(2).run(what_a_run_says, config)[0]
    assert "dp 1 x pp 1 x cp 2 x tp 1; context by ring, zigzag" in said
    assert "sample      none: text is not generated under context parallelism" in said
    events = json.loads(trace.read_text())["traceEvents"]
    shifts = [event["args"] for event in events if event["name"] == "shift cp"]
    # A layer and microbatch send one block forward; backward that block again, and its gradient.
    layers, passes = config.model.num_hidden_layers, config.batch.passes
    assert [sum(shift["backward"] == way for shift in shifts) for way in (False, True)] == [
        2 * layers * passes,
        4 * layers * passes,
    ]
    assert {shift["action"].split()[0] for shift in shifts} == {"F", "B"}


def what_a_run_says(config: TrainConfig) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_here(config)
    return said.getvalue()


def claims(config: TrainConfig) -> str:
    try:
        claim_output(config, build_mesh(config.mesh, here(config).rank, config.mesh.world_size))
    except TronError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_refuses_the_folder_of_another_run(tmp_path: Path, size: int) -> None:
    config = config_for(text_file(tmp_path), output_dir=tmp_path / "out", mesh=MeshConfig(tp_size=size))
    assert pool(size).run(claims, config) == [""] * size, "no rank may take its own run's folder for another's"
    assert (tmp_path / "out" / "config.toml").exists()
    refusals = pool(size).run(claims, config)
    assert all("holds another run" in refusal for refusal in refusals)
    (tmp_path / "file").write_text("")
    below = config.model_copy(update={"output_dir": tmp_path / "file" / "out"})
    assert all("cannot be written" in refusal and "--output-dir" in refusal for refusal in pool(size).run(claims, below))


def test_a_tokenizer_larger_than_the_vocab_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = config_for(text_file(tmp_path), model={**MODEL, "vocab_size": 255}, output_dir=tmp_path / "out")
    with pytest.raises(TronError, match="vocab_size=255"):
        run_here(config)
    assert not (tmp_path / "out").exists()


def test_a_prompt_longer_than_a_sample_is_read_from_its_end(tmp_path: Path) -> None:
    prompts = ("x" * 40 + "def f(x): ret", "y" * 3 + "def f(x): ret")
    configs = [config_for(text_file(tmp_path), sample_prompt=prompt) for prompt in prompts]
    model = build(config_for(text_file(tmp_path), model={**MODEL, "tie_word_embeddings": False}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(30 if weight.ndim > 1 else 1)
    samples = [take_sample(model, Tokenizer(None), config) for config in configs]
    assert samples[0] is not None
    assert samples[1] is not None
    assert samples[0].text[len(prompts[0]) :] == samples[1].text[len(prompts[1]) :]
    wider = [
        take_sample(model, Tokenizer(None), config.model_copy(update={"batch": BatchConfig(seq_len=60)})) for config in configs
    ]
    assert wider[0] is not None
    assert wider[0].text != samples[0].text, "what lies further back would have mattered"


def test_only_lines_of_a_jsonl_begin_with_bos() -> None:
    tokenizer = replace(load_tokenizer(None), bos_id=1)
    assert beginning(tokenizer, Path("a.jsonl")) == [1]
    assert beginning(tokenizer, Path("a.txt")) == beginning(tokenizer, None) == []
    assert beginning(load_tokenizer(None), Path("a.jsonl")) == []
