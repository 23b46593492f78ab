"""Text to token ids and labels, and which samples make up batch t.

Which samples a batch holds depends on the data, the seed and the step only; who computes which part of it is decided
elsewhere. Labels leave this file already shifted. Nothing here knows of ranks, and nothing here uses the network.
"""

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minimind_tron.errors import TronError
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.tokenizer import Tokenizer

_PIECE_BYTES = 1 << 20
_MEASURED_SAMPLES = 512
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_USE_A_FILE = "set --data to a .txt or .jsonl file with text"


@dataclass(frozen=True)
class Batch:
    """Token ids with the labels that belong to them.

    Shapes: both (B, S) int64; ``labels_BS[b, s]`` is the token after ``ids_BS[b, s]``, -100 where nothing is predicted.
    """

    ids_BS: Tensor
    labels_BS: Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one length, each cut from a run of at most S + 1 tokens: its first S are ids, all but the first labels.

    ``read`` gives the run of a place; ``unlabelled`` is a token that is never a label.
    """

    seq_len: int
    places: range
    read: Callable[[int], np.ndarray] = field(repr=False)
    pad: int
    unlabelled: int | None = None

    def __len__(self) -> int:
        return len(self.places)

    def sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Sample i as ids and labels, padded.

        Shapes: both (S,) int64.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        run = self.read(self.places[i])
        ids, labels = np.full(self.seq_len, self.pad, np.int64), np.full(self.seq_len, IGNORED, np.int64)
        ids[: len(run)] = run[: self.seq_len]
        labels[: max(0, len(run) - 1)] = run[1:]
        if self.unlabelled is not None:
            labels[labels == self.unlabelled] = IGNORED
        return torch.from_numpy(ids), torch.from_numpy(labels)


@dataclass(frozen=True)
class Corpus:
    """What a run reads: samples to train on, samples held out, and where they came from.

    ``bytes_per_token`` is UTF-8 bytes of text per label, measured on the first 512 held-out samples: nats per token
    divided by it are nats per byte.
    """

    train: Samples
    heldout: Samples
    description: str
    bytes_per_token: float


def load_corpus(data: Path | None, tokenizer: Tokenizer, seq_len: int, heldout_fraction: float = 0.05) -> Corpus:
    """Read a .txt, a .jsonl of {"text": ...}, or, where no file is given, the sources of Python's standard library.

    Held out are the last windows of a .txt, the last lines of a .jsonl (at least one each), and whole files of the
    library, chosen by a hash of their relative path: there, all nodes of a job need the same Python.
    Cost: a .txt and the library are tokenized once and their ids kept. Every line of a .jsonl is checked once and 8 bytes
    of it kept; a sample is read and tokenized when it is asked for.
    Raises: TronError if the file cannot be used; the message names the line or the byte.
    Source: a line becomes what MiniMind's PretrainDataset makes of it: bos, what fits, eos, padding; the pad token is
    no label even where the text spells it out. Different here: if pad and eos are one token, eos stays a label.
    """
    assert seq_len >= 1, seq_len
    assert 0 < heldout_fraction < 1, heldout_fraction
    if data is None:
        return _standard_library(tokenizer, seq_len, heldout_fraction)
    data = Path(data)
    readers = {".txt": _text_file, ".jsonl": _json_lines}
    if not data.is_file():
        raise TronError(f"data={data} {'is not a file' if data.exists() else 'does not exist'}", _USE_A_FILE)
    if data.suffix.lower() not in readers:
        raise TronError(f"data={data} ends in {data.suffix or 'nothing'}, wanted is .txt or .jsonl", _USE_A_FILE)
    try:
        if data.stat().st_size == 0:
            raise TronError(f"data={data} is empty", _USE_A_FILE)
        return readers[data.suffix.lower()](data, tokenizer, seq_len, heldout_fraction)
    except OSError as error:
        raise TronError(f"data={data} cannot be read: {error.strerror}", _USE_A_FILE) from error


def _corpus(train: Samples, heldout: Samples, source: str, tokenizer: Tokenizer) -> Corpus:
    labels = torch.cat([heldout.sample(i)[1] for i in range(min(len(heldout), _MEASURED_SAMPLES))]).numpy()
    labels = labels[labels != IGNORED]
    split = f"{len(train):,} samples of {train.seq_len} tokens to train on, {len(heldout):,} held out"
    return Corpus(train, heldout, f"{source}; {split}", tokenizer.count_bytes(labels) / max(1, len(labels)))


def _windows(stream: np.ndarray, seq_len: int, tokenizer: Tokenizer) -> Samples:
    """A stream cut into windows side by side; each holds the label of its last id too, the last window may be short."""

    def read(place: int) -> np.ndarray:
        return stream[place * seq_len : (place + 1) * seq_len + 1]

    return Samples(seq_len, range(-(-(len(stream) - 1) // seq_len)), read, tokenizer.pad_id or 0)


def _split(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    cut = len(samples) - min(len(samples) - 1, max(1, round(len(samples) * fraction)))
    return replace(samples, places=samples.places[:cut]), replace(samples, places=samples.places[cut:])


def _standard_library(tokenizer: Tokenizer, seq_len: int, heldout_fraction: float) -> Corpus:
    root, paths = Path(sysconfig.get_path("stdlib")), []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    dtype = tokenizer.encode_array("").dtype
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype).tobytes()
    train, heldout, read_bytes, read_files = bytearray(), bytearray(), 0, 0
    for path in sorted(paths):
        try:
            source = (root / path).read_bytes()
            text = source.decode("utf-8")
        except (OSError, UnicodeDecodeError):  # a dangling link, or a source in another encoding
            continue
        place = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
        stream = heldout if place < heldout_fraction else train
        stream += (eos if stream else b"") + tokenizer.encode_array(text).tobytes()
        read_bytes, read_files = read_bytes + len(source), read_files + 1
    ids = [np.frombuffer(stream, dtype) for stream in (train, heldout)]
    if min(map(len, ids)) < 2:
        what = f"this Python has {read_files} readable .py files in its standard library, wanted are 2 with text or more"
        raise TronError(what, _USE_A_FILE)
    name = f"standard library of Python {platform.python_version()}"
    what = f"{name}: {read_files:,} files, {read_bytes:,} bytes, {sum(map(len, ids)):,} tokens"
    return _corpus(_windows(ids[0], seq_len, tokenizer), _windows(ids[1], seq_len, tokenizer), what, tokenizer)


def _text_file(data: Path, tokenizer: Tokenizer, seq_len: int, heldout_fraction: float) -> Corpus:
    stream, read_bytes = bytearray(), 0
    with data.open("rb") as file:
        # Pieces of about 1 MiB, cut at line ends: a tokenizer needs some hundred bytes of memory for a byte of text.
        while piece := b"".join(file.readlines(_PIECE_BYTES)):
            stream += tokenizer.encode_array(_decode(piece, f"data={data}", read_bytes)).tobytes()
            read_bytes += len(piece)
    ids = np.frombuffer(stream, tokenizer.encode_array("").dtype)
    if len(ids) < seq_len + 2:
        wanted = f"at least {seq_len + 2}: one window of seq_len={seq_len} to train on, a second, if short, to hold out"
        shorter = f", or --seq-len {len(ids) - 2}" if len(ids) > 2 else ""
        raise TronError(f"data={data} has {len(ids)} tokens, wanted are {wanted}", f"use a longer --data{shorter}")
    train, heldout = _split(_windows(ids, seq_len, tokenizer), heldout_fraction)
    return _corpus(train, heldout, f"{data}: 1 file, {read_bytes:,} bytes, {len(ids):,} tokens", tokenizer)


def _json_lines(data: Path, tokenizer: Tokenizer, seq_len: int, heldout_fraction: float) -> Corpus:
    # Not read by `datasets`: it writes a second copy of the text to disk and does not tell which line is broken.
    bos, eos = ([] if i is None else [i] for i in (tokenizer.bos_id, tokenizer.eos_id))
    least = max(2, len(bos + eos) + 1)
    if seq_len < least:
        what = f"seq_len={seq_len} is too short for a sample of a .jsonl, wanted is {least} or more"
        raise TronError(what, f"use --seq-len {least}")
    offsets, offset = array("q"), 0
    with data.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                _text_of(line, f"data={data} line {number}", offset)
                offsets.append(offset)
            offset += len(line)

    def read(place: int) -> np.ndarray:
        with data.open("rb") as file:
            file.seek(offsets[place])
            text = _text_of(file.readline(), f"data={data} sample {place}", offsets[place])
        return np.array(bos + tokenizer.encode(text)[: seq_len - len(bos + eos)] + eos, np.int64)

    if len(offsets) < 2:
        what = f"data={data} has {len(offsets)} samples, wanted are at least 2: one to train on, one to hold out"
        raise TronError(what, _USE_A_FILE)
    pad = tokenizer.pad_id
    samples = Samples(seq_len, range(len(offsets)), read, pad or 0, None if pad == tokenizer.eos_id else pad)
    train, heldout = _split(samples, heldout_fraction)
    for part, use in ((train, "train on"), (heldout, "hold out")):
        if not any((part.sample(i)[1] != IGNORED).any() for i in range(len(part))):
            what = f"data={data} has no usable sample to {use}: each of its {len(part)} is too short to have a label"
            raise TronError(what, "use a --data with longer texts")
    return _corpus(train, heldout, f"{data}: 1 file, {offset:,} bytes, {len(offsets):,} samples", tokenizer)


def _decode(raw: bytes, where: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {offset + error.start}"
        raise TronError(what, "convert the file of --data to UTF-8") from error


def _text_of(line: bytes, where: str, offset: int) -> str:
    fix = 'every line of --data must be a JSON object with a string "text"'
    if offset == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        record = json.loads(_decode(line.rstrip(), where, offset))
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise TronError(f"{where} is not JSON ({reason})", fix) from error
    if not isinstance(record, dict):
        raise TronError(f"{where} is a JSON {type(record).__name__}, not an object", fix)
    if "text" not in record:
        raise TronError(f'{where} has no "text"', fix)
    text = record["text"]
    if not isinstance(text, str):
        raise TronError(f'{where} has a "text" of type {type(text).__name__}, wanted is a string', fix)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TronError(f'{where} has a "text" with half a surrogate pair, which is no character', fix) from error
    return text


@lru_cache(maxsize=2)  # a batch over the border of two epochs needs two
def order(samples_count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its samples: a permutation that (seed, epoch) alone decide.

    Shapes: (samples_count,) int64, read-only.
    Source: Philox with the key (seed, epoch). Its raw bits are sorted: numpy keeps those the same in all its versions,
    but not what its ``permutation`` makes of them.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)).random_raw(samples_count)
    permutation = np.argsort(bits, kind="stable").astype(np.int64, copy=False)
    permutation.setflags(write=False)
    return permutation


def batch_at(samples: Samples, step: int, global_batch_size: int, seed: int) -> Batch:
    """The global batch of a step (the first is 0), drawn without replacement in an epoch and running on over its end.

    Row j is the sample at place ``step * global_batch_size + j`` of the epochs' permutations, one after the other.
    Shapes: (global_batch_size, S).
    Cost: the same for every step; a permutation is computed where an epoch begins.
    """
    assert step >= 0, step
    assert global_batch_size >= 1, global_batch_size
    places = range(step * global_batch_size, (step + 1) * global_batch_size)
    epochs_and_turns = (divmod(place, len(samples)) for place in places)
    return _stack([samples.sample(int(order(len(samples), seed, e)[i])) for e, i in epochs_and_turns])


def heldout_batches(samples: Samples, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """The samples in their own order, as at most ``limit`` batches of one shape (None: all).

    Shapes: (batch_size, S); rows missing in the last batch have ids 0 and labels -100.
    """
    assert batch_size >= 1, batch_size
    for start in range(0, len(samples), batch_size)[:limit]:
        rows = [samples.sample(i) for i in range(start, min(start + batch_size, len(samples)))]
        blank = (torch.zeros_like(rows[0][0]), torch.full_like(rows[0][1], IGNORED))
        yield _stack(rows + [blank] * (batch_size - len(rows)))


def _stack(rows: list[tuple[Tensor, Tensor]]) -> Batch:
    return Batch(torch.stack([ids for ids, _ in rows]), torch.stack([labels for _, labels in rows]))
