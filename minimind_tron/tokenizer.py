"""Text to token ids and back: bytes, or any Hugging Face tokenizer folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minimind_tron.errors import TronError

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back; every id is below ``vocab_size``, and a special token the tokenizer lacks is None.

    ``hf`` is the tokenizer of ``transformers``, where the chat template is. None stands for bytes: 256 ids, each one the
    byte of that value. Python's own UTF-8 encoder does those, since ``transformers`` takes seconds to import.
    """

    hf: Any
    vocab_size: int = 256
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special token is added."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text in the smallest type that holds every id."""
        if self.hf is None:
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        ids = self.hf.encode(text, add_special_tokens=False, verbose=False)
        return np.array(ids, dtype=np.min_scalar_type(self.vocab_size - 1))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens shown, ids outside the vocabulary dropped, broken UTF-8 replaced."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        if self.hf is None:
            return bytes(known).decode("utf-8", "replace")
        return self.hf.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def count_bytes(self, ids: np.ndarray) -> int:
        """The length in UTF-8 of the text that ids stand for; special tokens have none."""
        if self.hf is None:
            return len(ids)
        return len(self.decode(ids[~np.isin(ids, self.hf.all_special_ids)]).encode("utf-8", "replace"))

    def save(self, folder: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(folder)`` reads."""
        (self.hf or _byte_level()).save_pretrained(folder)


def _byte_level() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    # GPT-2's alphabet: a printable byte is written as itself, the others, in order, as the characters from 256 on.
    spare, printable = iter(range(256, 512)), set(byte_level.alphabet())
    vocabulary = {chr(b if chr(b) in printable else next(spare)): b for b in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer in a local folder, or the byte tokenizer where none is given.

    Raises: TronError if the folder is missing or holds no tokenizer that can be read.
    """
    if folder is None:
        return Tokenizer(None)
    fix = "set --tokenizer to a local folder with a tokenizer.json, or leave it out to train on bytes"
    if not Path(folder).is_dir():
        raise TronError(f"tokenizer={folder} is not a folder", fix)
    # transformers 5 makes an empty tokenizer of a folder that holds nothing but a model.
    if not any(any(Path(folder).glob(pattern)) for pattern in _VOCABULARIES):
        raise TronError(f"tokenizer={folder} holds no tokenizer (no tokenizer.json, no vocabulary file)", fix)
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        ids_count = max(len(hf), 1 + max(hf.get_vocab().values()))  # more than len where ids have gaps
    except Exception as error:  # a broken file raises a bare Exception in `tokenizers`
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TronError(f"tokenizer={folder} cannot be read: {reason}", fix) from error
    return Tokenizer(hf, ids_count, hf.bos_token_id, hf.eos_token_id, hf.pad_token_id)


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with more ids than the model has rows in its embedding.

    Raises: TronError naming both numbers.
    """
    if tokenizer.vocab_size > vocab_size:
        what = f"vocab_size={vocab_size} is too small for a tokenizer with {tokenizer.vocab_size} ids"
        raise TronError(what, f"use --vocab-size {tokenizer.vocab_size} or more, or a smaller --tokenizer")
