"""Weights from and to other programs: Qwen3 folders of Hugging Face, and the ``.pth`` state dicts of MiniMind.

MiniMind and this package name their parameters as Hugging Face does for Qwen3, so a file fits a model name by name, and the
``Layout`` of a parameter says which region of the whole tensor a rank reads. Reading sends nothing: every rank opens the files.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minimind_tron.collectives import gather_named, gather_whole, sum_over
from minimind_tron.config import ModelConfig
from minimind_tron.config_files import read_json
from minimind_tron.errors import TronError
from minimind_tron.layout import INITIAL_STD, Layout, layout_of
from minimind_tron.model import Model

if TYPE_CHECKING:
    # transformers takes seconds to import, and no command but those that need it should wait.
    from transformers import Qwen3Config

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Tables of rotary angles that older programs saved beside the weights; the config decides them.
DERIVED = ("freqs_cos", "freqs_sin", "pos_cis", "inv_freq")
FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
# How many tensors of a kind an error names.
NAMED = 4

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor whose elements are still in its file; ``read`` takes a region out of it and no more."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Region], Tensor]


def _safetensors_in(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, in the order of precedence that transformers has."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise TronError(f"{index} has no weight_map", "change --weights")
        names = sorted({str(name) for name in places.values()})
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise TronError(f"{index} names {_some(absent)}, which {folder} lacks", "complete the folder, or change --weights")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TronError(f"{folder} holds no .safetensors file", "give the folder of a Hugging Face Qwen3 model to --weights")
    return files


def _open_folder(folder: Path, handles: ExitStack) -> dict[str, Stored]:
    given: dict[str, Stored] = {}
    for path in _safetensors_in(folder):
        try:
            file = handles.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise TronError(f"{path} is damaged ({error})", "fetch it again, or change --weights") from None
        for name in file.keys():  # noqa: SIM118 (safe_open has no __iter__)
            if name in given:
                raise TronError(f"{name} is in {path} and in another file of {folder}", "remove one, or change --weights")
            part = file.get_slice(name)
            given[name] = Stored(tuple(part.get_shape()), part.get_dtype(), part.__getitem__)
    return given


def _open_pth(path: Path) -> dict[str, Stored]:
    try:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise TronError(f"{path} cannot be read ({error.strerror})", "change --weights") from None
    except Exception as error:
        # Unpickling damaged bytes ends in whatever they happen to mean.
        reason = type(error).__name__
        raise TronError(f"{path} is damaged or is not a .pth file of tensors ({reason})", "change --weights") from None
    if not isinstance(values, dict):
        raise TronError(f"{path} holds a {type(values).__name__}, a dict of tensors is wanted", "change --weights")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TronError(
                f"{path} holds a {type(value).__name__} under {name!r}, a dict of names and tensors is wanted",
                "give the weights alone, as MiniMind saves them for inference, to --weights",
            )
    return {name: Stored(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.__getitem__) for name, x in values.items()}


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Stored]]:
    """Every tensor of a folder or a ``.pth`` file, by name, unread; readable while the context is open."""
    with ExitStack() as handles:
        yield _open_folder(path, handles) if path.is_dir() else _open_pth(path)


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def _check_fit(wanted: dict[str, Layout], given: dict[str, Stored], ignored: set[str], path: Path) -> None:
    """Refuse a file unless it holds exactly the wanted tensors, whatever of them this rank needs."""
    both = [(name, list(given[name].shape), list(layout.shape)) for name, layout in wanted.items() if name in given]
    problems = {
        "missing": [f"{name} {list(layout.shape)}" for name, layout in wanted.items() if name not in given],
        "extra": [f"{name} {list(stored.shape)}" for name, stored in given.items() if name not in wanted.keys() | ignored],
        "misshapen": [f"{name} {has} where {wants} is wanted" for name, has, wants in both if has != wants],
        "not floating point": [f"{name} ({given[name].dtype})" for name, *_ in both if given[name].dtype not in FLOATS],
    }
    found = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise TronError(f"{path} does not fit the model: {', '.join(found)}", "change --weights or the model's sizes")


def _check_tied(embedding: Layout, given: dict[str, Stored], path: Path) -> None:
    """Refuse a head that differs from the embedding it is tied to; every rank compares its own region."""
    head, table = given[HEAD], given[EMBEDDING]
    if head.shape == table.shape:
        a, b = head.read(embedding.region), table.read(embedding.region)
        wider = torch.promote_types(a.dtype, b.dtype)
        if torch.equal(a.to(wider), b.to(wider)):
            return
    raise TronError(
        f"{HEAD} and {EMBEDDING} of {path} differ, but tie_word_embeddings=True makes one of both",
        "use --no-tie-word-embeddings or change --weights",
    )


def load_weights(model: Model, path: Path) -> None:
    """Fill a model, on any mesh, from a Hugging Face Qwen3 folder or a MiniMind ``.pth`` file; values take the model's dtype.

    Tied models accept files with or without ``lm_head.weight``, provided it equals the embedding.

    Cost: every rank reads the regions it holds, one tensor at a time, and sends nothing.
    Raises: TronError that names every missing, extra and misshapen tensor up to a handful of each, and for damaged files; nothing
    is written then. Also for a tensor with NaN or infinity, when its turn comes.
    """
    weights = dict(model.named_parameters())
    # The whole model's, without memory: a stage checks the file for all of them.
    dense = Model(model.config, device="meta")
    wanted = {name: layout_of(weight) for name, weight in dense.named_parameters()}
    tied = model.config.tie_word_embeddings
    with _opened(path) as given:
        ignored = {name for name in given if name.rpartition(".")[2] in DERIVED or (tied and name == HEAD)}
        _check_fit(wanted, given, ignored, path)
        if tied and HEAD in given:
            _check_tied(layout_of(weights[EMBEDDING]) if EMBEDDING in weights else wanted[EMBEDDING], given, path)
        for name, weight in weights.items():
            layout = layout_of(weight)
            region = given[name].read(layout.region)
            if not region.isfinite().all():
                raise TronError(f"{name} in {path} has elements that are NaN or infinite", "change --weights")
            model.masters.fill(name, region)


def hugging_face_config(config: ModelConfig) -> "Qwen3Config":
    """The same architecture as transformers spells it."""
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=INITIAL_STD,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attention_bias=config.attention_bias,
        use_sliding_window=False,
    )


def _plan_shards(layouts: dict[str, Layout], dtype: torch.dtype, max_shard_size: int | str) -> StateDictSplit:
    """Which tensor goes into which file; decided from shapes, so that all ranks decide alike before any tensor is whole."""
    shapes = {name: torch.empty(layout.shape, dtype=dtype, device="meta") for name, layout in layouts.items()}
    try:
        return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    except ValueError as error:
        raise TronError(f"max_shard_size={max_shard_size!r} was given ({error})", "give a size such as '5GB'") from None


def _clear(folder: Path) -> None:
    """Make room for new weights: shards of an earlier model would be read along with them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", path.name):
            path.unlink()


def save_hugging_face(
    model: Model,
    folder: Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Write a folder that transformers opens as Qwen3ForCausalLM: whole tensors without padding, tied ones once.

    Every rank calls it; rank 0 writes, and no rank returns before the folder is complete. Weights that the folder held before are
    removed. ``dtype`` is that of the file, unless given that of the masters under mixed precision and the model's own
    otherwise.

    Cost: one gather of each cut tensor, and with several stages one broadcast of each, one after the other, and an all-reduce of
    one number; rank 0 (every stage, where there are several) holds one shard at a time.
    Raises: TronError, before anything is written, for a folder that is a file, a size that is none and an id outside the vocab.
    """
    weights = model.masters.values()
    dtype = dtype or next(iter(weights.values()))[0].dtype
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    for name, token in ids.items():
        if token is not None and not 0 <= token < model.config.vocab_size:
            raise TronError(f"{name}={token} is outside of vocab_size={model.config.vocab_size}", "change the tokenizer")
    if folder.exists() and not folder.is_dir():
        raise TronError(f"{folder} is a file, a folder is wanted", "choose another folder")
    dense = Model(model.config, device="meta")
    plan = _plan_shards({name: layout_of(weight) for name, weight in dense.named_parameters()}, dtype, max_shard_size)
    mesh = model.mesh
    writes = mesh.rank == 0
    if writes:
        _clear(folder)
    for file, names in plan.filename_to_tensors.items():
        shard: dict[str, Tensor] = {}
        for name in names:
            mine = {name: gather_whole(*weights[name])} if name in weights else {}
            whole = gather_named(mine, mesh.pp)[name]
            if writes:
                shard[name] = whole.to("cpu", dtype).contiguous()
        if writes:
            save_file(shard, folder / file, metadata={"format": "pt"})
    if writes:
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config = hugging_face_config(model.config)
        config.update({**ids, "dtype": dtype})
        config.save_pretrained(folder)
    # Whoever reads the folder next, on whatever rank, must find it complete.
    sum_over(torch.zeros(1, device=model.storage.device), (mesh.tp, mesh.cp, mesh.pp, mesh.dp))
