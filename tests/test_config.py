"""Every refusal names the value, the wish and the flag in one line; every derived size is that of a real model."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimind_tron.config import BatchConfig, Config, ModelConfig, OptimizerConfig, divisors, flag, nearest
from minimind_tron.config_files import fields_of, flatten, from_hugging_face, from_toml, to_toml
from minimind_tron.errors import TronError
from minimind_tron.run_config import RunConfig, TrainConfig, ValidateConfig
from minimind_tron.topology import MeshConfig, StrategyConfig, check_cut, describe_switches

REFUSALS = [
    (ModelConfig, {"vocab_size": 1}, "vocab_size=1 was given, at least 2 is wanted", "change --vocab-size"),
    *(
        (ModelConfig, {name: 0}, f"{name}=0 was given, at least 1 is wanted", f"change {flag(name)}")
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        )
    ),
    (ModelConfig, {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 was given, more than 0 is wanted", "change --rms-norm-eps"),
    (ModelConfig, {"rope_theta": -1.0}, "rope_theta=-1.0 was given, more than 0 is wanted", "change --rope-theta"),
    (
        ModelConfig,
        {"hidden_size": 770},
        "hidden_size=770 is not a multiple of num_attention_heads=8",
        "change one of them or give --head-dim",
    ),
    (
        ModelConfig,
        {"head_dim": 7},
        "head_dim=7 is odd, and rotary positions turn pairs of channels",
        "change --head-dim, --hidden-size or --num-attention-heads",
    ),
    (
        ModelConfig,
        {"num_key_value_heads": 3},
        "num_attention_heads=8 is not a multiple of num_key_value_heads=3",
        "use --num-key-value-heads 8 or 4 or 2 or 1",
    ),
    (
        ModelConfig,
        {"num_key_value_heads": 16},
        "num_attention_heads=8 is not a multiple of num_key_value_heads=16",
        "use --num-key-value-heads 8 or 4 or 2 or 1",
    ),
    (
        ModelConfig,
        {"hidden_size": "wide"},
        "hidden_size='wide' was given: input should be a valid integer, unable to parse string as an integer",
        "change --hidden-size",
    ),
    (ModelConfig, {"rope_theta": float("inf")}, "rope_theta=inf was given: input should be a finite number", "change --rope-theta"),
    (ModelConfig, {"hiden_size": 4}, "hiden_size is not a known key", "did you mean hidden_size?"),
    (ModelConfig, {"zzz": 4}, "zzz is not a known key", ""),
    (MeshConfig, {"tp_size": 0}, "tp_size=0 was given, at least 1 is wanted", "change --tp-size"),
    (MeshConfig, {"cp_size": 0}, "cp_size=0 was given, at least 1 is wanted", "change --cp-size"),
    (BatchConfig, {"seq_len": 0}, "seq_len=0 was given, at least 1 is wanted", "change --seq-len"),
    (BatchConfig, {"micro_batch_size": 0}, "micro_batch_size=0 was given, at least 1 is wanted", "change --micro-batch-size"),
    (BatchConfig, {"global_batch_size": 0}, "global_batch_size=0 was given, at least 1 is wanted", "change --global-batch-size"),
    (
        BatchConfig,
        {"global_batch_size": 10, "micro_batch_size": 4},
        "global_batch_size=10 is not a whole number of micro_batch_size=4",
        "use --global-batch-size 8 or 12",
    ),
    (
        BatchConfig,
        {"global_batch_size": 3, "micro_batch_size": 4},
        "global_batch_size=3 is not a whole number of micro_batch_size=4",
        "use --global-batch-size 4",
    ),
    *(
        (OptimizerConfig, {name: -1}, rf"{name}=-1(.0)? was given, at least 0 is wanted", f"change {flag(name)}")
        for name in ("learning_rate", "min_learning_rate", "warmup_steps", "weight_decay", "clip_norm")
    ),
    (OptimizerConfig, {"eps": 0.0}, "eps=0.0 was given, at least 1e-20 is wanted", "change --eps"),
    (OptimizerConfig, {"beta1": 1.0}, "beta1=1.0 was given, 0 <= beta1 < 1 is wanted", "change --beta1"),
    (OptimizerConfig, {"beta2": -0.1}, "beta2=-0.1 was given, 0 <= beta2 < 1 is wanted", "change --beta2"),
    (
        OptimizerConfig,
        {"min_learning_rate": 1.0, "learning_rate": 0.5},
        "min_learning_rate=1.0 is above learning_rate=0.5",
        "lower --min-learning-rate",
    ),
    (RunConfig, {"seed": -1}, "seed=-1 was given, at least 0 is wanted", "change --seed"),
    (RunConfig, {"dropout": 1.0}, "dropout=1.0 was given, 0 <= dropout < 1 is wanted", "change --dropout"),
    (RunConfig, {"dropout": -0.1}, "dropout=-0.1 was given, 0 <= dropout < 1 is wanted", "change --dropout"),
    (
        RunConfig,
        {"precision": "mixed", "dtype": "bfloat16"},
        "precision=mixed computes in bfloat16 and updates float32 masters, but dtype=bfloat16 was given",
        "leave out --dtype, or use --precision full",
    ),
    (
        RunConfig,
        {"mesh": MeshConfig(dp_size=2), "batch": BatchConfig(micro_batch_size=4, global_batch_size=12)},
        "global_batch_size=12 cannot be shared out over dp=2 in microbatches of 4",
        "use --global-batch-size 8 or 16",
    ),
    (
        RunConfig,
        {"mesh": MeshConfig(dp_size=4), "batch": BatchConfig(micro_batch_size=8)},
        "global_batch_size=8 cannot be shared out over dp=4 in microbatches of 8",
        "use --global-batch-size 32, or --micro-batch-size 2",
    ),
    (
        RunConfig,
        {"mesh": MeshConfig(dp_size=8), "batch": BatchConfig(micro_batch_size=4)},
        "global_batch_size=4 cannot be shared out over dp=8 in microbatches of 4",
        "use --global-batch-size 32",
    ),
    (MeshConfig, {"dp_size": 0}, "dp_size=0 was given, at least 1 is wanted", "change --dp-size"),
    (StrategyConfig, {"zero": 4}, "zero=4 was given: input should be 0, 1, 2 or 3", "change --zero"),
    (
        StrategyConfig,
        {"recompute": "all"},
        "recompute='all' was given: input should be 'none', 'block' or 'selective'",
        "change --recompute",
    ),
    (RunConfig, {"device": "tpu"}, "device='tpu' was given: input should be 'auto', 'cpu' or 'cuda'", "change --device"),
    (
        RunConfig,
        {"mesh": MeshConfig(tp_size=3)},
        "num_attention_heads=8 cannot be cut over tp=3",
        "use --tp-size 2 or 1",
    ),
    (
        RunConfig,
        {"mesh": MeshConfig(tp_size=2, cp_size=8), "strategy": StrategyConfig(cp_comm_type="a2a")},
        "num_attention_heads=8 cannot be cut over tp=2 x cp=8 by cp_comm_type=a2a",
        "use --cp-size 4 or 2 or 1, or --cp-comm-type ring",
    ),
    (
        ValidateConfig,
        {"mesh": MeshConfig(cp_size=3), "strategy": StrategyConfig(cp_comm_type="a2a")},
        "num_attention_heads=8 cannot be cut over cp=3 by cp_comm_type=a2a",
        "use --cp-size 2 or 1, or --cp-comm-type ring",
    ),
    (
        StrategyConfig,
        {"cp_comm_type": "p2p"},
        "cp_comm_type='p2p' was given: input should be 'all_gather', 'a2a' or 'ring'",
        "change --cp-comm-type",
    ),
    (
        TrainConfig,
        {"mesh": MeshConfig(cp_size=2), "sample_tokens": 5},
        "sample_tokens=5 was given, and text is not generated over cp=2",
        "leave out --sample-tokens, or use --cp-size 1",
    ),
    *(
        (TrainConfig, {name: 0}, f"{name}=0 was given, at least 1 is wanted", f"change {flag(name)}")
        for name in ("steps", "log_interval", "eval_interval", "eval_batches", "max_skipped")
    ),
    (TrainConfig, {"sample_tokens": -1}, "sample_tokens=-1 was given, at least 0 is wanted", "change --sample-tokens"),
    (TrainConfig, {"steps": 3, "epochs": 1.0}, "steps=3 and epochs=1.0 were both given", "give --steps or --epochs"),
    (TrainConfig, {"epochs": 0.0}, "epochs=0.0 was given, more than 0 is wanted", "change --epochs"),
    (TrainConfig, {"sample_prompt": ""}, "sample_prompt is empty, text to continue is wanted", "change --sample-prompt"),
    (TrainConfig, {"data": Path("gone.txt")}, "data=gone.txt is not there, a file is wanted", "change --data"),
    (TrainConfig, {"tokenizer": Path("gone")}, "tokenizer=gone is not there, a folder is wanted", "change --tokenizer"),
    (
        TrainConfig,
        {"dtype": "float16"},
        "dtype='float16' was given: input should be 'float64', 'float32' or 'bfloat16'",
        "change --dtype",
    ),
    (ValidateConfig, {"optimizer_steps": -1}, "optimizer_steps=-1 was given, at least 0 is wanted", "change --optimizer-steps"),
    (ValidateConfig, {"log_interval": 0}, "log_interval=0 was given, at least 1 is wanted", "change --log-interval"),
    (ValidateConfig, {"atol": -1.0}, "atol=-1.0 was given, at least 0 is wanted", "change --atol"),
    (ValidateConfig, {"rtol": -1.0}, "rtol=-1.0 was given, at least 0 is wanted", "change --rtol"),
    (
        ValidateConfig,
        {"batch": BatchConfig(seq_len=1)},
        "seq_len=1 was given, and a single position has no gradient for q and k",
        "use --seq-len 2 or more",
    ),
    (
        ValidateConfig,
        {"weights": Path("gone.pth")},
        "weights=gone.pth is not there, a file or folder is wanted",
        "change --weights",
    ),
]


@pytest.mark.parametrize(("kind", "values", "what", "fix"), REFUSALS, ids=[f"{k.__name__}-{v}" for k, v, _, _ in REFUSALS])
def test_refusal(kind: type[Config], values: dict[str, object], what: str, fix: str) -> None:
    with pytest.raises(TronError) as error:
        kind(**values)
    assert error.value.what == what or re.fullmatch(what, error.value.what), error.value.what
    assert error.value.fix == fix
    assert str(error.value) == (f"{error.value.what}; {fix}" if fix else error.value.what)
    assert "\n" not in str(error.value)


def test_configs_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        ModelConfig().hidden_size = 4


def test_every_flag_has_a_help_text_and_a_name_of_its_own() -> None:
    for kind in (TrainConfig, ValidateConfig):
        flat = fields_of(kind)
        count = 0
        for name, info in kind.model_fields.items():
            nested = info.annotation
            fields = nested.model_fields if isinstance(nested, type) and issubclass(nested, Config) else {name: info}
            count += len(fields)
            assert [key for key, field in fields.items() if not field.description] == []
        assert len(flat) == count
    assert (fields_of(TrainConfig)["tp_size"], fields_of(TrainConfig)["seed"]) == (MeshConfig, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp = 2\ncp_size = 3\n", "cp and cp_size in {path} say the same thing; remove one of them"),
        ("tp_size = 2\ntp-size = 2\n", "tp_size and tp-size in {path} say the same thing; remove one of them"),
        ("[mesh]\ncp = 2\n", "[mesh] in {path} is a table, and keys stand at the top level; remove the line [mesh]"),
    ],
)
def test_a_file_says_things_once_and_flat(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(TronError) as error:
        from_toml(ValidateConfig, path)
    assert str(error.value) == message.format(path=path)


# Derived sizes


def test_zigzag_is_the_layout_where_it_evens_out_the_work() -> None:
    chosen = {way: StrategyConfig(cp_comm_type=way).sequence_layout for way in ("all_gather", "a2a", "ring")}
    assert chosen == {"all_gather": "zigzag", "a2a": "contiguous", "ring": "zigzag"}
    assert StrategyConfig(cp_comm_type="a2a", cp_layout="zigzag").sequence_layout == "zigzag"
    assert StrategyConfig(cp_layout="contiguous").sequence_layout == "contiguous"


def test_a_sample_is_made_unless_the_sequence_is_cut() -> None:
    lengths = [TrainConfig(mesh=MeshConfig(cp_size=cp), sample_tokens=asked).sample_length for cp in (1, 2) for asked in (None, 0)]
    assert lengths == [200, 0, 0, 0]


def test_ring_and_gathered_keys_take_any_number_of_ranks() -> None:
    for way in ("all_gather", "ring"):
        RunConfig(mesh=MeshConfig(cp_size=3, tp_size=2), strategy=StrategyConfig(cp_comm_type=way))
    RunConfig(mesh=MeshConfig(cp_size=4, tp_size=2), strategy=StrategyConfig(cp_comm_type="a2a"))


def test_switches_in_words() -> None:
    cut = MeshConfig(cp_size=2)
    assert describe_switches(MeshConfig(), StrategyConfig(cp_comm_type="a2a")) == "no other switch"
    assert describe_switches(cut, StrategyConfig()) == "context by ring, zigzag"
    both = StrategyConfig(sequence_parallel=True, cp_comm_type="all_gather", cp_layout="contiguous")
    assert describe_switches(cut, both) == "sequence parallel, context by all-gather, contiguous"


def test_the_default_is_minimind() -> None:
    config = ModelConfig()
    assert (config.head_width, config.ffn_size, config.num_parameters) == (96, 2432, 63_912_192)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"head_dim": 6, "num_key_value_heads": 1},
        {"intermediate_size": 5},
    ],
)
def test_num_parameters_is_that_of_a_real_model(changes: dict[str, object]) -> None:
    from minimind_tron.model import Model

    base = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = ModelConfig(**{**base, **changes})
    assert config.num_parameters == sum(weight.numel() for weight in Model(config).parameters())


def test_batch_samples() -> None:
    assert BatchConfig(micro_batch_size=3).samples == 3
    assert BatchConfig(micro_batch_size=3, global_batch_size=6).samples == 6


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20))
def test_suggested_batch_sizes_are_the_two_nearest(samples: int, micro: int) -> None:
    if samples % micro == 0:
        assert BatchConfig(global_batch_size=samples, micro_batch_size=micro).samples == samples
        return
    with pytest.raises(TronError) as error:
        BatchConfig(global_batch_size=samples, micro_batch_size=micro)
    near = [size for size in range(1, samples + micro + 1) if size % micro == 0 and abs(size - samples) < micro]
    assert [int(n) for n in re.findall(r"\d+", error.value.fix)] == near


def test_learning_rate_floor() -> None:
    assert OptimizerConfig(learning_rate=0.5).floor == 0.05
    assert OptimizerConfig(min_learning_rate=0.0).floor == 0


def test_divisors() -> None:
    assert divisors(12) == [12, 6, 4, 3, 2, 1]
    assert divisors(12, 18) == [6, 3, 2, 1]


def test_degrees_multiply_to_the_world_size() -> None:
    assert MeshConfig(tp_size=4).degrees == {"dp": 1, "pp": 1, "cp": 1, "tp": 4}
    assert MeshConfig(tp_size=4).world_size == 4


# What a mesh can cut


def cuts(config: ModelConfig, tp: int) -> bool:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return heads % tp == 0 and config.ffn_size % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_check_cut_suggests_what_it_takes(kv_heads: int, groups: int, ffn: int, tp: int) -> None:
    config = ModelConfig(
        hidden_size=8, head_dim=2, num_attention_heads=kv_heads * groups, num_key_value_heads=kv_heads, intermediate_size=ffn
    )
    if cuts(config, tp):
        check_cut(config, MeshConfig(tp_size=tp))
        return
    with pytest.raises(TronError) as error:
        check_cut(config, MeshConfig(tp_size=tp))
    assert f"tp={tp}" in error.value.what
    suggested = [int(n) for n in re.findall(r"\d+", error.value.fix)]
    assert suggested == [d for d in range(tp, 0, -1) if cuts(config, d)]
    for degree in suggested:
        check_cut(config, MeshConfig(tp_size=degree))


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "num_attention_heads=8 cannot be cut over tp=3; use --tp-size 2 or 1"),
        ({}, 16, "num_attention_heads=8 cannot be cut over tp=16; use --tp-size 8 or 4 or 2 or 1"),
        (
            {"intermediate_size": 6},
            4,
            "intermediate_size=6 cannot be cut over tp=4; use --tp-size 2 or 1, or change --intermediate-size",
        ),
        (
            {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 12},
            4,
            "num_key_value_heads=6 and tp=4: one must be a multiple of the other; use --tp-size 3 or 2 or 1",
        ),
    ],
)
def test_check_cut_says_which_size(changes: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(TronError) as error:
        check_cut(ModelConfig(**changes), MeshConfig(tp_size=tp))
    assert str(error.value) == message


# Hugging Face's config.json

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def test_from_hugging_face() -> None:
    config = from_hugging_face(QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "x")
    assert (config.vocab_size, config.head_width, config.ffn_size, config.rms_norm_eps) == (100, 16, 48, 1e-5)
    assert (config.rope_theta, config.tie_word_embeddings, config.num_key_value_heads) == (5e5, False, 2)
    older = from_hugging_face(QWEN3 | {"rope_theta": 1e4, "rope_scaling": None, "head_dim": None}, "x")
    assert (older.rope_theta, older.head_width) == (1e4, 8)
    assert from_hugging_face(QWEN3 | {"num_key_value_heads": None}, "x").num_key_value_heads == 4


def test_keys_that_a_qwen3_config_leaves_out_have_transformers_defaults() -> None:
    from transformers import Qwen3Config

    bare = {name: QWEN3[name] for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    ours, theirs = from_hugging_face(bare | {"num_attention_heads": 64}, "x"), Qwen3Config(**bare, num_attention_heads=64)
    assert (ours.head_width, ours.num_key_value_heads, ours.ffn_size) == (
        theirs.head_dim,
        theirs.num_key_value_heads,
        theirs.intermediate_size,
    )
    assert (ours.rope_theta, ours.tie_word_embeddings) == (theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings)


def test_from_hugging_face_reads_what_transformers_writes() -> None:
    from minimind_tron.interop import hugging_face_config

    config = ModelConfig(vocab_size=100, rope_theta=3e4, head_dim=32, tie_word_embeddings=False, attention_bias=True)
    read = from_hugging_face(hugging_face_config(config).to_dict(), "x")
    assert (read.head_width, read.ffn_size) == (config.head_width, config.ffn_size)
    resolved = config.model_copy(update={"intermediate_size": config.ffn_size})
    assert read == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "x describes a 'llama' model, Qwen3 is wanted; change --weights"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "x asks for rotary scaling {'type': 'yarn', 'factor': 4}, only the default is known; change --weights",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "x asks for rotary scaling {'rope_type': 'linear'}, only the default is known",
        ),
        ({"use_sliding_window": True}, "x asks for a sliding window, which this model lacks; change --weights"),
        ({"hidden_act": "gelu"}, "x has hidden_act='gelu', 'silu' is wanted; change --weights"),
        ({"use_moe": True}, "x describes a mixture of experts, a dense model is wanted; change --weights"),
        ({"hidden_size": None, "vocab_size": None}, "x lacks hidden_size, vocab_size; give the folder of a Qwen3 model"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_from_hugging_face_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TronError) as error:
        from_hugging_face(QWEN3 | changes, "x")
    assert str(error.value).startswith(message)


# TOML


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def checked(config: Config) -> Config:
    """The same values, made again with every check."""
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return type(config)(**{name: checked(value) if isinstance(value, Config) else value for name, value in values.items()})


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(
            model=ModelConfig(vocab_size=300, head_dim=64, rope_theta=1e4, tie_word_embeddings=False),
            mesh=MeshConfig(tp_size=4),
            strategy=StrategyConfig(sequence_parallel=True, sp_recompute=False),
            batch=BatchConfig(seq_len=9, global_batch_size=6),
            optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=3),
            seed=7,
            epochs=1.5,
            sample_prompt='ein "Zitat"\n行',
            output_dir=Path("out/ä b"),
        ),
        ValidateConfig(atol=1e-9, json_file=Path("a.json"), dtype="bfloat16", check_backward=False),
    ],
)
def test_toml_round_trip(tmp_path: Path, config: RunConfig) -> None:
    text = to_toml(config)
    assert from_toml(type(config), written(tmp_path, text)) == config
    assert checked(from_toml(type(config), tmp_path / "run.toml")) == config
    assert tomllib.loads(text) == flatten(config)


def test_toml_keeps_types_and_leaves_out_what_is_not_given() -> None:
    values = tomllib.loads(to_toml(TrainConfig()))
    kept = {"tp_size": 1, "vocab_parallel": False, "learning_rate": 5e-4, "device": "auto", "output_dir": "out/train"}
    assert {name: values[name] for name in kept} == kept
    assert not {"steps", "epochs", "head_dim", "data"} & values.keys()


def test_toml_leaves_the_rest_at_its_default(tmp_path: Path) -> None:
    config = from_toml(TrainConfig, written(tmp_path, "hidden_size = 64\nlearning_rate = 1\n"))
    assert (config.model.hidden_size, config.optimizer.learning_rate) == (64, 1.0)
    assert (config.model.num_hidden_layers, config.steps, config.batch) == (8, None, BatchConfig())


def test_toml_is_checked_later_so_that_flags_may_mend_it(tmp_path: Path) -> None:
    config = from_toml(TrainConfig, written(tmp_path, "num_key_value_heads = 3\n"))
    with pytest.raises(TronError, match="num_key_value_heads=3"):
        checked(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden_size = 4", r"hiden_size in .*run\.toml is not a known key; did you mean hidden_size\?"),
        ("zzz = 4", r"zzz in .*run\.toml is not a known key; remove it"),
        ("[model]\nhidden_size = 4", r"\[model\] in .*run\.toml is a table"),
        ('hidden_size = "wide"', r"hidden_size='wide' in .*run\.toml was given: input should be a valid integer.*; mend the file"),
        ('device = "tpu"', r"device='tpu' in .*run\.toml was given: .*'cuda'; mend the file"),
        ("hidden_size = ", r"config=.*run\.toml is not TOML: .*; mend the file"),
    ],
)
def test_toml_refusals(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TronError, match=message) as error:
        from_toml(TrainConfig, written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_toml_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TronError, match=r"config=.*gone\.toml cannot be read \(No such file or directory\); change --config"):
        from_toml(TrainConfig, tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes(b'sample_prompt = "\xe9"')
    with pytest.raises(TronError, match="is not TOML"):
        from_toml(TrainConfig, tmp_path / "latin.toml")


def test_nearest() -> None:
    assert nearest("sequence-paralel", ["sequence_parallel", "seed"]) == "did you mean sequence_parallel?"
    assert nearest("qqq", ["sequence_parallel"]) == ""


def test_a_run_refuses_a_folder_that_holds_another(tmp_path: Path) -> None:
    TrainConfig(output_dir=tmp_path).check_before_start()
    TrainConfig(output_dir=tmp_path / "new").check_before_start()
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "holds another run; choose an empty --output-dir"), (tmp_path / "file", "is a file")):
        with pytest.raises(TronError, match=rf"output_dir=.* {message}"):
            TrainConfig(output_dir=path).check_before_start()
