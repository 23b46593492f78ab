"""Weights from and to Hugging Face and MiniMind: both directions, on every mesh, and what is refused."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from minimind_tron import interop
from minimind_tron.config import ModelConfig
from minimind_tron.config_files import from_hugging_face, read_config
from minimind_tron.errors import TronError
from minimind_tron.interop import hugging_face_config, load_weights, save_hugging_face
from minimind_tron.layout import layout_of
from minimind_tron.mesh import Axis, Mesh, build_mesh
from minimind_tron.model import Model, initialise
from minimind_tron.topology import MeshConfig, StrategyConfig
from tests.pool import pool

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "rope_theta": 5e5,
}
TIED = ModelConfig(**SIZES, tie_word_embeddings=True)
UNTIED = ModelConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)
CUT = StrategyConfig(vocab_parallel=True)
GOLDEN = Path(__file__).parents[2] / "shared" / "data" / "minimind-golden"
IDS_SB = torch.arange(24).view(12, 2) * 7 % 61


def somebody_elses(folder: Path, config: ModelConfig, **save: Any) -> dict[str, Tensor]:
    """A float64 model that transformers made and wrote, with norms and biases that show what is done to them."""
    theirs = Qwen3ForCausalLM(hugging_face_config(config)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3 + (weight.ndim == 1))
    theirs.save_pretrained(folder, **save)
    return {name: weight.detach().clone() for name, weight in theirs.named_parameters()}


def written(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def bit_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def fake_rank(rank: int) -> Mesh:
    """Rank of a tp=4 mesh without processes: enough for what sends nothing."""
    pair = rank // 2 * 2
    return Mesh(tp=Axis("tp", 4, rank, (0, 1, 2, 3), sharers={2: Axis("tp/2", 2, rank % 2, (pair, pair + 1))}))


def dense(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Model:
    model = Model(config, dtype=dtype)
    initialise(model, seed=1, spread=0.1)
    return model


def there_and_back(source: Path, target: Path, vocab_parallel: bool, options: dict[str, Any]) -> Tensor:
    # One rank has no process group.
    world = torch.distributed if torch.distributed.is_initialized() else None
    rank, size = (world.get_rank(), world.get_world_size()) if world else (0, 1)
    mesh = build_mesh(MeshConfig(tp_size=size), rank, size)
    strategy = StrategyConfig(vocab_parallel=vocab_parallel)
    model = Model(read_config(source), mesh, strategy, dtype=torch.float64)
    load_weights(model, source)
    save_hugging_face(model, target, **options)
    # Every rank, not rank 0 alone, must find the folder complete; config.json is written last.
    assert read_config(target) == model.config
    load_weights(model, target)
    return model.logits(IDS_SB)


ONE_KV_HEAD = ModelConfig(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True, attention_bias=True)


@pytest.mark.parametrize("config", [TIED, UNTIED, ONE_KV_HEAD], ids=["tied", "untied-bias", "one-kv-head"])
@pytest.mark.parametrize(("tp", "vocab_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_round_trip(config: ModelConfig, tp: int, vocab_parallel: bool, tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path / "theirs", config)
    logits = pool(tp).run(there_and_back, tmp_path / "theirs", tmp_path / "ours", vocab_parallel, {})
    assert bit_equal(written(tmp_path / "ours"), theirs)
    assert not bit_equal(written(tmp_path / "ours"), dict(dense(config).named_parameters()))
    opened = Qwen3ForCausalLM.from_pretrained(tmp_path / "ours")
    assert opened.dtype == torch.float64
    with torch.no_grad():
        expected = opened(IDS_SB.T).logits.transpose(0, 1)
    for own in logits:
        # transformers normalises in float32.
        assert (own - expected).norm() <= 1e-6 * expected.norm()
    assert (dense(config).logits(IDS_SB) - expected).norm() > 1e-2 * expected.norm()


def test_shards_and_their_index(tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path / "theirs", UNTIED, max_shard_size="9KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    pool(2).run(there_and_back, tmp_path / "theirs", tmp_path / "ours", True, {"max_shard_size": "7KB"})
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(x.numel() * 8 for x in theirs.values())
    for path in files:
        held = load_file(path)
        assert len(held) == 1 or sum(x.numel() * 8 for x in held.values()) <= 7000
    assert bit_equal(written(tmp_path / "ours"), theirs)
    assert bit_equal(dict(Qwen3ForCausalLM.from_pretrained(tmp_path / "ours").named_parameters()), theirs)


def test_shards_without_index(tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path, UNTIED, max_shard_size="9KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    model = dense(UNTIED)
    load_weights(model, tmp_path)
    assert bit_equal(dict(model.named_parameters()), theirs)


def test_saving_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    (tmp_path / "model-of-somebody.safetensors").touch()
    save_hugging_face(dense(UNTIED), tmp_path, max_shard_size="7KB")
    save_hugging_face(dense(TIED), tmp_path)
    (tmp_path / "model-of-somebody.safetensors").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert bit_equal(written(tmp_path), dict(dense(TIED).named_parameters()))


def test_dtype_and_ids_of_the_saved_model(tmp_path: Path) -> None:
    model = dense(TIED)
    save_hugging_face(model, tmp_path, dtype=torch.bfloat16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    opened = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.bfloat16
    assert bit_equal(written(tmp_path), {name: weight.bfloat16() for name, weight in model.named_parameters()})
    assert (opened.config.bos_token_id, opened.config.eos_token_id, opened.config.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("form", ["folder", "pth"])
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied-bias"])
def test_a_rank_reads_its_slices_only(config: ModelConfig, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = somebody_elses(tmp_path, config)
    path = tmp_path if form == "folder" else tmp_path / "model.pth"
    torch.save(theirs, tmp_path / "model.pth")
    read: list[int] = []
    stored = interop.Stored

    def counting(shape: tuple[int, ...], dtype: str, real: Callable[[Any], Tensor]) -> Any:
        def counted(region: Any) -> Tensor:
            part = real(region)
            read.append(part.numel())
            return part

        return stored(shape, dtype, counted)

    load = mock.Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(interop, "Stored", counting)
    whole = sum(x.numel() for x in theirs.values())
    for rank in range(4):
        read.clear()
        model = Model(config, fake_rank(rank), CUT, dtype=torch.float64)
        load_weights(model, path)
        held = 0
        for name, weight in model.named_parameters():
            layout = layout_of(weight)
            real = layout.unpadded(weight)
            assert torch.equal(real, theirs[name][layout.region]), name
            assert weight.count_nonzero() == real.count_nonzero(), f"the padding of {name} is not zero"
            held += real.numel()
        assert sum(read) == held < whole * 0.45
    read.clear()
    load_weights(dense(config), path)
    assert sum(read) == whole
    assert [call.kwargs["mmap"] for call in load.call_args_list] == ([] if form == "folder" else [True] * 5)


def test_a_rank_whose_vocab_is_all_padding(tmp_path: Path) -> None:
    config = ModelConfig(**{**SIZES, "vocab_size": 5})
    theirs = somebody_elses(tmp_path, config)
    model = Model(config, fake_rank(3), CUT, dtype=torch.float64)
    load_weights(model, tmp_path)
    assert not model.model.embed_tokens.weight.any()
    assert torch.equal(model.model.norm.weight, theirs["model.norm.weight"])


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_golden_minimind(rank: int | None) -> None:
    if not GOLDEN.is_dir():
        pytest.skip("shared/data/minimind-golden is not beside the repository")
    values = json.loads((GOLDEN / "tiny_tied_half.config.json").read_text())
    config = from_hugging_face(values, "golden")
    saved = torch.load(GOLDEN / "tiny_tied_half.pth", weights_only=True)
    model = Model(config, Mesh() if rank is None else fake_rank(rank), CUT, dtype=torch.float64)
    load_weights(model, GOLDEN / "tiny_tied_half.pth")
    for name, weight in model.named_parameters():
        layout = layout_of(weight)
        assert torch.equal(layout.unpadded(weight), saved[name][layout.region].double())
    if rank is None:
        expected = load_file(GOLDEN / "tiny_tied_half.expected.safetensors")
        logits = model.logits(expected["input_ids"].T).transpose(0, 1)
        assert (logits - expected["logits"]).norm() <= 1e-6 * expected["logits"].norm()


@pytest.mark.parametrize("zipped", [True, False])
def test_pth_with_derived_buffers(zipped: bool, tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path / "theirs", UNTIED)
    tables = {"model.freqs_cos": torch.ones(32, 6), "freqs_sin": torch.ones(32, 6)}
    torch.save({**theirs, **tables}, tmp_path / "old.pth", _use_new_zipfile_serialization=zipped)
    model = dense(UNTIED)
    load_weights(model, tmp_path / "old.pth")
    assert bit_equal(dict(model.named_parameters()), theirs)
    torch.save({**theirs, "model.freqs": torch.ones(3)}, tmp_path / "old.pth")
    assert "extra: model.freqs [3]" in refusal(load_weights, model, tmp_path / "old.pth")


def test_half_precision_becomes_the_models_dtype(tmp_path: Path) -> None:
    halves = {name: weight.half() for name, weight in somebody_elses(tmp_path / "theirs", TIED).items()}
    save_file(halves, tmp_path / "model.safetensors")
    model = dense(TIED, torch.float32)
    load_weights(model, tmp_path)
    assert bit_equal(dict(model.named_parameters()), {name: x.float() for name, x in halves.items()})


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(TronError) as caught:
        function(*args, **options)
    return str(caught.value)


def test_all_that_does_not_fit_is_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    model = dense(UNTIED)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    wrong = {name: weight + 1 for name, weight in before.items()}
    del wrong["model.norm.weight"], wrong["lm_head.weight"]
    wrong["model.embed_tokens.weight"] = torch.ones(60, 16)
    wrong["model.layers.0.self_attn.q_norm.weight"] = torch.ones(6, dtype=torch.int64)
    wrong.update({f"visual.{i}": torch.ones(3, 1) for i in range(9)})
    torch.save(wrong, tmp_path / "wrong.pth")
    save_file(wrong, tmp_path / "model.safetensors")
    for path, integer in ((tmp_path / "wrong.pth", "int64"), (tmp_path, "I64")):
        message = refusal(load_weights, model, path)
        assert "missing: model.norm.weight [16], lm_head.weight [61, 16], extra: " in message
        assert "extra: visual.0 [3, 1], visual.1 [3, 1], visual.2 [3, 1], visual.3 [3, 1] and 5 more" in message
        assert "misshapen: model.embed_tokens.weight [60, 16] where [61, 16] is wanted" in message
        assert f"not floating point: model.layers.0.self_attn.q_norm.weight ({integer})" in message
        assert "change --weights" in message
        assert str(path) in message
    assert bit_equal(dict(model.named_parameters()), before)


def test_every_rank_refuses_what_only_others_hold(tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path, TIED)
    save_file({**theirs, "model.embed_tokens.weight": torch.ones(62, 16)}, tmp_path / "model.safetensors")
    for rank in range(4):
        assert "misshapen" in refusal(load_weights, Model(TIED, fake_rank(rank), CUT), tmp_path)


def test_a_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path / "theirs", TIED)
    table = theirs["model.embed_tokens.weight"]
    model = dense(TIED)
    torch.save({**theirs, "lm_head.weight": table.clone()}, tmp_path / "same.pth")
    load_weights(model, tmp_path / "same.pth")
    assert bit_equal(dict(model.named_parameters()), theirs)
    other = table.clone()
    other[-1, -1] += 1e-9
    for head in (other, table[:60], table.float()):
        torch.save({**theirs, "lm_head.weight": head.clone()}, tmp_path / "other.pth")
        message = refusal(load_weights, dense(TIED), tmp_path / "other.pth")
        assert "lm_head.weight and model.embed_tokens.weight" in message
        assert "--no-tie-word-embeddings" in message


def test_an_untied_model_needs_a_head(tmp_path: Path) -> None:
    theirs = somebody_elses(tmp_path, UNTIED)
    del theirs["lm_head.weight"]
    save_file(theirs, tmp_path / "model.safetensors")
    assert "does not fit the model: missing: lm_head.weight [61, 16]; " in refusal(load_weights, dense(UNTIED), tmp_path)


def test_damaged_pth(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pth"
    torch.save(dense(TIED).state_dict(), whole)
    load_weights(dense(TIED), whole)
    path = tmp_path / "weights.pth"
    for content in (whole.read_bytes()[:-100], whole.read_bytes()[:1000], b"", b"hello", pickle.dumps(print, protocol=2)):
        path.write_bytes(content)
        message = refusal(load_weights, dense(TIED), path)
        assert "damaged" in message
        assert str(path) in message
    for value, held in (
        ([torch.ones(1)], "holds a list, a dict of tensors is wanted"),
        ({"model": {"model.norm.weight": torch.ones(1)}, "epoch": 3}, "holds a dict under 'model'"),
        ({1: torch.ones(1)}, "holds a Tensor under 1"),
    ):
        torch.save(value, path)
        assert held in refusal(load_weights, dense(TIED), path)
    assert "cannot be read" in refusal(load_weights, dense(TIED), tmp_path / "nowhere.pth")


def test_damaged_folders(tmp_path: Path) -> None:
    model = dense(TIED)
    assert "holds no .safetensors file" in refusal(load_weights, model, tmp_path)
    save_hugging_face(model, tmp_path)
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    content = single.read_bytes()
    for part in (content[:-1], content[:9], b""):
        single.write_bytes(part)
        assert f"{single} is damaged" in refusal(load_weights, model, tmp_path)
    single.rename(tmp_path / "a.safetensors").write_bytes(content)
    load_weights(model, tmp_path)
    (tmp_path / "b.safetensors").write_bytes(content)
    assert "and in another file of" in refusal(load_weights, model, tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "c.safetensors"}}))
    assert "names c.safetensors, which" in refusal(load_weights, model, tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))
    load_weights(model, tmp_path)
    for text, says in (("{", "cannot be read as JSON"), ("[]", "holds a list"), ("{}", "has no weight_map")):
        index.write_text(text)
        assert says in refusal(load_weights, model, tmp_path)


def test_read_config(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json; give the folder" in refusal(read_config, tmp_path)
    assert "--weights" in refusal(read_config, tmp_path / "nowhere.pth")
    file = tmp_path / "config.json"
    for content in (b"{", b"\xff\xfe", b"[" * 100_000, b""):
        file.write_bytes(content)
        message = refusal(read_config, tmp_path)
        assert f"{file} cannot be read as JSON" in message
        assert "--weights" in message
    file.write_text("[1]")
    assert "holds a list, a JSON object is wanted" in refusal(read_config, tmp_path)
    file.write_text(json.dumps({"model_type": "llama"}))
    assert f"{file} describes a 'llama' model" in refusal(read_config, tmp_path)


@pytest.mark.parametrize("config", [ModelConfig(), TIED, UNTIED, ModelConfig(rms_norm_eps=1e-5, rope_theta=1e4)])
def test_config_there_and_back(config: ModelConfig, tmp_path: Path) -> None:
    theirs = hugging_face_config(config)
    theirs.save_pretrained(tmp_path)
    got = read_config(tmp_path)
    written_out = {"head_dim": config.head_width, "intermediate_size": config.ffn_size}
    assert got == config.model_copy(update=written_out)
    assert got != config.model_copy(update={**written_out, "rope_theta": 3.0})
    assert isinstance(theirs, Qwen3Config)


def test_transformers_waits_until_it_is_needed() -> None:
    code = "import sys, minimind_tron.interop; print('transformers' in sys.modules, 'huggingface_hub' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "True"]


def test_refusals_of_save_leave_the_folder_alone(tmp_path: Path) -> None:
    model = dense(TIED)
    (tmp_path / "file").touch()
    assert "is a file, a folder is wanted" in refusal(save_hugging_face, model, tmp_path / "file")
    message = refusal(save_hugging_face, model, tmp_path / "new", max_shard_size="5 apples")
    assert "max_shard_size='5 apples'" in message
    assert "pad_token_id=61 is outside of vocab_size=61" in refusal(save_hugging_face, model, tmp_path / "new", pad_token_id=61)
    assert not (tmp_path / "new").exists()
