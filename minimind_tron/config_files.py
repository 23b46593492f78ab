"""Configs from and to files: TOML with the keys of the flags, and Hugging Face's config.json; all of it without torch."""

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import TypeAdapter, ValidationError

from minimind_tron.config import Config, ModelConfig, nearest
from minimind_tron.errors import TronError
from minimind_tron.run_config import ValidateConfig

C = TypeVar("C", bound=Config)
# Short flags that the command line takes, too.
ALIASES = {"tp": "tp_size", "pp": "pp_size", "cp": "cp_size", "dp": "dp_size", "json": "json_file"}
# Keys that say the same thing.
ALTERNATIVES = (("global_batch_size", "num_microbatches"), ("steps", "epochs"))
# What transformers' Qwen3Config assumes for a key that a config.json leaves out.
QWEN3_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def fields_of(kind: type[Config]) -> dict[str, type[Config] | None]:
    """Every key of a config, flat as the flags are, with the nested config it belongs to (None: to the config itself)."""
    found: dict[str, type[Config] | None] = {}
    for name, info in kind.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, Config):
            found |= dict.fromkeys(nested.model_fields, nested)
        else:
            found[name] = None
    return found


def flatten(config: Config) -> dict[str, Any]:
    """The values of a config under the names of its flags, as TOML and JSON take them; what is None is left out."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config):
            flat |= flatten(value)
        elif value is not None:
            flat[name] = str(value) if isinstance(value, Path) else value
    return flat


def to_toml(config: Config) -> str:
    """The resolved config as a file that ``--config`` takes."""
    import tomli_w

    return tomli_w.dumps(flatten(config))


def from_toml(kind: type[C], path: Path, given: Collection[str] = ()) -> C:
    """A config with a file's values and otherwise defaults, not yet checked: flags may still replace what does not fit.

    ``given`` are the keys that flags set; another way of saying the same thing is then not taken from the file.

    Raises: TronError for a file that cannot be read, a key that is not known and a value of the wrong type.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TronError(f"config={path} cannot be read ({error.strerror})", "change --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TronError(f"config={path} is not TOML: {error}", "mend the file") from None
    known = fields_of(kind)
    values = _by_field(values, path)
    for name, other in (*ALTERNATIVES, *((b, a) for a, b in ALTERNATIVES)):
        if name in given:
            values.pop(other, None)
    overlooked = {name for other in kind.overlooks for name in fields_of(other)} - known.keys()
    values = {name: value for name, value in values.items() if name not in overlooked}
    for name, value in values.items():
        if name not in known and isinstance(value, dict):
            raise TronError(f"[{name}] in {path} is a table, and keys stand at the top level", f"remove the line [{name}]")
        if name not in known:
            raise TronError(f"{name} in {path} is not a known key", nearest(name, known) or "remove it")
        owner: type[Config] = known[name] or kind
        annotation: Any = owner.model_fields[name].annotation
        if get_origin(annotation) is tuple and isinstance(value, str):
            # One of several is written as one where a flag takes one only, and a file may be for both.
            value = [value]
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            # As JSON: strict there still takes a string for a path and 1 for 1.0, but not "1" or true for 1.
            values[name] = adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"].lower()
            raise TronError(f"{name}={value!r} in {path} was given: {message}", "mend the file") from None
    parts: dict[str, Any] = {name: value for name, value in values.items() if known[name] is None}
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Config):
            own = {key: values[key] for key in info.annotation.model_fields if key in values}
            parts[name] = info.annotation.model_construct(**own)
    return kind.model_construct(**parts)


def _by_field(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The values under the names of their fields; a file may spell those as flags are spelt, and each once."""
    found: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in found:
            raise TronError(f"{spelt[name]} and {key} in {path} say the same thing", "remove one of them")
        found[name], spelt[name] = value, key
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder.

    Raises: TronError for a file that cannot be read or holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TronError(f"{path} cannot be read as JSON ({error})", "change --weights") from None
    if not isinstance(values, dict):
        raise TronError(f"{path} holds a {type(values).__name__}, a JSON object is wanted", "change --weights")
    return values


def _refuse_foreign(values: dict[str, Any], source: str) -> None:
    """Refuse every feature that changes the numbers and that this model lacks."""
    if values.get("model_type", "qwen3") not in ("qwen3", "minimind"):
        raise TronError(f"{source} describes a {values['model_type']!r} model, Qwen3 is wanted", "change --weights")
    layers = set(values.get("layer_types") or [])
    if values.get("use_sliding_window") or layers - {"full_attention"}:
        raise TronError(f"{source} asks for a sliding window, which this model lacks", "change --weights")
    if values.get("hidden_act", "silu") != "silu":
        raise TronError(f"{source} has hidden_act={values['hidden_act']!r}, 'silu' is wanted", "change --weights")
    if values.get("use_moe"):
        raise TronError(f"{source} describes a mixture of experts, a dense model is wanted", "change --weights")


def from_hugging_face(values: dict[str, Any], source: str) -> ModelConfig:
    """The architecture that a config.json describes; keys it leaves out mean what they mean to the program that wrote it.

    Raises: TronError for an architecture other than Qwen3 and for every feature this model lacks.
    """
    _refuse_foreign(values, source)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise TronError(f"{source} asks for rotary scaling {rope}, only the default is known", "change --weights")
    known = {name: values[name] for name in ModelConfig.model_fields if values.get(name) is not None}
    if "rope_theta" in rope:
        known["rope_theta"] = rope["rope_theta"]
    missing = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"} - known.keys()
    if missing:
        raise TronError(f"{source} lacks {', '.join(sorted(missing))}", "give the folder of a Qwen3 model")
    if values.get("model_type") == "qwen3":
        # A key that is there but null means what this package means by it, too: derive it.
        known = {name: value for name, value in QWEN3_DEFAULTS.items() if name not in values} | known
    known.setdefault("num_key_value_heads", known["num_attention_heads"])
    return ModelConfig(**known)


def read_config(folder: Path) -> ModelConfig:
    """The architecture of the model in a Hugging Face folder, from its config.json alone.

    Raises: TronError when there is no config.json, when it is broken, or when it describes another architecture.
    """
    source = folder / "config.json"
    if not source.is_file():
        raise TronError(f"{folder} has no config.json", "give the folder of a Hugging Face Qwen3 model to --weights")
    return from_hugging_face(read_json(source), str(source))


def with_weights(config: ValidateConfig) -> ValidateConfig:
    """The config with the architecture of the weights folder, where one is given; the model's flags then count for nothing.

    Raises: TronError for a folder that is no Qwen3 model, or one the mesh cannot cut.
    """
    if config.weights is None or not config.weights.is_dir():
        return config
    return config.with_model(read_config(config.weights))
