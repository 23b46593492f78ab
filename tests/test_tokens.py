"""Text to ids and labels, what batch t is, and every refusal of minimind_tron.tokens."""

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimind_tron import tokens
from minimind_tron.errors import TronError
from minimind_tron.parallel.vocab import IGNORED
from minimind_tron.tokenizer import Tokenizer, check_tokenizer_fits, load_tokenizer
from minimind_tron.tokens import Batch, Samples, batch_at, heldout_batches, load_corpus, order

DATA = Path(__file__).parents[2] / "shared" / "data"
BYTES = load_tokenizer(None)


@pytest.fixture(scope="session")
def minimind() -> Tokenizer:
    folder = DATA / "minimind-tokenizer"
    if not folder.is_dir():
        pytest.skip("../shared/data/minimind-tokenizer is not there")
    return load_tokenizer(folder)


def numbered(count: int) -> Samples:
    """Samples whose first id is their own number."""
    return Samples(2, range(count), lambda i: np.array([i, 1, 1]), 0)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(path: Path, *texts: str) -> Path:
    return write(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def all_samples(corpus: tokens.Corpus) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in (corpus.train, corpus.heldout):
        yield from (part.sample(i) for i in range(len(part)))


# The byte tokenizer


def test_byte_ids_are_the_bytes_and_nothing_else() -> None:
    assert BYTES.vocab_size == 256
    assert (BYTES.bos_id, BYTES.eos_id, BYTES.pad_id) == (None, None, None)
    assert BYTES.encode("Aé\n") == [65, 0xC3, 0xA9, 10]
    assert BYTES.encode_array("é").tolist() == BYTES.encode("é")


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_byte_round_trip(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


def test_broken_utf8_and_unknown_ids_decode() -> None:
    assert BYTES.decode([65, 0xFF, 66]) == "A\ufffdB"
    assert BYTES.decode([65, 256, -1, 66]) == "AB"


def test_saved_byte_tokenizer_is_the_same_for_transformers(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert (saved.vocab_size, saved.bos_id, saved.eos_id, saved.pad_id) == (256, None, None, None)
    assert len(saved.hf) == 256
    every_character = "".join(map(chr, [*range(0x800), 0x4E2D, 0x1F600, 0x10FFFF]))
    for text in ("", " a  b\n\n\tc ", "it's 12 é", "并行😀", every_character):
        assert saved.encode(text) == BYTES.encode(text)
        assert saved.decode(saved.encode(text)) == text
    for b in range(256):
        assert saved.decode([b]) == BYTES.decode([b])
    assert saved.decode([0xE4, 0xB8, 65, 0xFF]) == BYTES.decode([0xE4, 0xB8, 65, 0xFF])


def test_the_byte_tokenizer_needs_no_transformers() -> None:
    code = "import sys; from minimind_tron import tokenizer, tokens; tokens.load_corpus(None, tokenizer.load_tokenizer(None), 64);"
    code += "print([m for m in ('transformers', 'tokenizers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tokenizers in folders


def test_minimind_tokenizer(minimind: Tokenizer, tmp_path: Path) -> None:
    assert (minimind.vocab_size, minimind.bos_id, minimind.eos_id, minimind.pad_id) == (6400, 1, 2, 0)
    text = "并行 training <|im_end|>😀"
    assert minimind.decode(minimind.encode(text)) == text
    assert minimind.encode_array(text).dtype == np.uint16
    minimind.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == minimind.encode(text)


def test_vocab_size_covers_ids_with_gaps(tmp_path: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    gapped = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=gapped).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab_size == 10
    assert loaded.encode("b") == [9]


@pytest.mark.parametrize("content", [None, {}, {"config.json": '{"model_type": "qwen3"}'}, {"tokenizer.json": "{"}])
def test_no_tokenizer_names_the_flag(tmp_path: Path, content: dict[str, str] | None) -> None:
    folder = tmp_path / "tokenizer"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            write(folder / name, text)
    with pytest.raises(TronError) as error:
        load_tokenizer(folder)
    assert str(folder) in error.value.what
    assert "--tokenizer" in error.value.fix
    assert "\n" not in str(error.value)


def test_check_tokenizer_fits() -> None:
    check_tokenizer_fits(BYTES, 256)
    with pytest.raises(TronError, match=r"vocab_size=255 .*256 ids.*--vocab-size 256"):
        check_tokenizer_fits(BYTES, 255)


# The standard library


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_this_standard_library() -> None:
    corpus = load_corpus(None, BYTES, 128)
    assert len(corpus.train) > len(corpus.heldout) > 10
    assert corpus.bytes_per_token == 1.0
    for word in ("standard library", "files", "bytes", "tokens"):
        assert word in corpus.description
    again = load_corpus(None, BYTES, 128)
    assert corpus.description == again.description
    assert all(torch.equal(a, b) for a, b in zip(corpus.heldout.sample(3), again.heldout.sample(3), strict=True))


def test_library_files_are_chosen_and_held_out_whole(library: Path) -> None:
    for name in (f"m{i:03}" for i in range(300)):
        write(library / f"{name}.py", f"<{name}>")
    for name in ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"):
        (library / "package" / name).mkdir(parents=True)
        write(library / "package" / name / "no.py", "NEVER")
    write(library / "package" / "deep.py", "<deep>")
    write(library / "latin.py", b"NEVER \xe9")
    write(library / "notes.txt", "NEVER")
    os.symlink(library / "nowhere", library / "dangling.py")
    corpus = load_corpus(None, BYTES, 7)
    parts = []
    for part in (corpus.train, corpus.heldout):
        run = b"".join(bytes(part.sample(i)[0].tolist()) for i in range(len(part))).rstrip(b"\0").decode()
        parts.append(run.removeprefix("<").removesuffix(">").split("><"))
    assert sorted(parts[0] + parts[1]) == ["deep"] + [f"m{i:03}" for i in range(300)]
    assert parts[0] == sorted(parts[0], key=lambda n: f"package/{n}" if n == "deep" else n)
    assert 5 <= len(parts[1]) <= 30
    (library / f"{parts[0][0]}.py").unlink()  # the choice hangs on each file's own path, not on its neighbours
    again = load_corpus(None, BYTES, 7).heldout
    assert len(again) == len(corpus.heldout)
    assert all(torch.equal(again.sample(i)[0], corpus.heldout.sample(i)[0]) for i in range(len(again)))


def test_library_files_have_eos_between_them(library: Path, minimind: Tokenizer) -> None:
    for i in range(60):
        write(library / f"m{i:02}.py", "A")
    corpus = load_corpus(None, minimind, 1000)
    (a,) = minimind.encode("A")
    ids = corpus.train.sample(0)[0].tolist()
    count = ids.count(a)
    assert ids[: 2 * count] == [a, minimind.eos_id] * (count - 1) + [a, minimind.pad_id]


def test_no_library_source_advises_data(library: Path) -> None:
    with pytest.raises(TronError, match=r"0 readable \.py files.*--data"):
        load_corpus(None, BYTES, 8)


# .txt


def test_text_windows_and_labels(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.txt", "abcdefghij"), BYTES, 4)
    rows = [(bytes(ids.tolist()), labels.tolist()) for ids, labels in all_samples(corpus)]
    assert rows == [(b"abcd", [*b"bcde"]), (b"efgh", [*b"fghi"]), (b"ij\0\0", [ord("j"), IGNORED, IGNORED, IGNORED])]
    assert (len(corpus.train), len(corpus.heldout)) == (2, 1)
    assert corpus.train.sample(0)[0].dtype == corpus.train.sample(0)[1].dtype == torch.int64
    assert corpus.bytes_per_token == 1.0
    with pytest.raises(IndexError):
        corpus.train.sample(2)


@pytest.mark.parametrize(("tokens_count", "windows"), [(6, 2), (8, 2), (9, 2), (10, 3), (401, 100)])
def test_every_window_has_a_label_and_every_token_but_the_first_is_one(tmp_path: Path, tokens_count: int, windows: int) -> None:
    corpus = load_corpus(write(tmp_path / "a.txt", "x" * tokens_count), BYTES, 4)
    counts = [int((labels != IGNORED).sum()) for _, labels in all_samples(corpus)]
    assert len(counts) == windows
    assert min(counts) >= 1
    assert sum(counts) == tokens_count - 1
    assert len(corpus.heldout) == max(1, round(windows * 0.05))


def test_text_is_read_in_pieces_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "".join(f"zeile {i} — ü\r\n" for i in range(50)))
    whole = [ids.tolist() for ids, _ in all_samples(load_corpus(path, BYTES, 16))]
    monkeypatch.setattr(tokens, "_PIECE_BYTES", 64)
    assert [ids.tolist() for ids, _ in all_samples(load_corpus(path, BYTES, 16))] == whole
    assert b"".join(bytes(row) for row in whole).rstrip(b"\0") == path.read_bytes()


def test_text_bytes_per_token(tmp_path: Path, minimind: Tokenizer) -> None:
    path = write(tmp_path / "a.txt", "Every rank holds a part of the matrix. 并行训练。\n" * 200)
    corpus = load_corpus(path, minimind, 32, heldout_fraction=0.5)
    assert corpus.bytes_per_token == pytest.approx(path.stat().st_size / len(minimind.encode(path.read_text())), rel=0.02)


def test_text_too_short_says_how_many_are_wanted(tmp_path: Path) -> None:
    load_corpus(write(tmp_path / "a.txt", "x" * 10), BYTES, 8)
    with pytest.raises(TronError, match=r"has 9 tokens, wanted are at least 10.*--data.*--seq-len 7") as error:
        load_corpus(write(tmp_path / "b.txt", "x" * 9), BYTES, 8)
    assert "\n" not in str(error.value)
    load_corpus(tmp_path / "b.txt", BYTES, 7)


# .jsonl


def test_golden_minimind_pretraining_samples(minimind: Tokenizer) -> None:
    golden = DATA / "minimind-golden"
    if not golden.is_dir():
        pytest.skip("../shared/data/minimind-golden is not there")
    expected = [json.loads(line) for line in (golden / "pretrain.expected.jsonl").read_text().splitlines()]
    corpus = load_corpus(golden / "pretrain.jsonl", minimind, 64)
    rows = list(all_samples(corpus))
    assert len(rows) == len(expected) == 20
    assert len(corpus.heldout) == 1
    for (ids, labels), want in zip(rows, expected, strict=True):
        assert ids.tolist() == want["input_ids"]
        assert labels.tolist() == [*want["labels"][1:], IGNORED]
    assert any(row["labels"][-1] == minimind.eos_id for row in expected), "no truncated sample among the golden ones"


def test_a_spelled_out_pad_token_is_no_label(tmp_path: Path, minimind: Tokenizer) -> None:
    path = lines(tmp_path / "a.jsonl", "A<|endoftext|>A", "A")
    (a,) = minimind.encode("A")
    ids, labels = load_corpus(path, minimind, 8).train.sample(0)
    assert ids.tolist() == [1, a, 0, a, 2, 0, 0, 0]
    assert labels.tolist() == [a, IGNORED, a, 2, IGNORED, IGNORED, IGNORED, IGNORED]
    same = dataclasses.replace(minimind, pad_id=minimind.eos_id)
    assert load_corpus(path, same, 8).train.sample(0)[1].tolist()[:4] == [a, 0, a, 2]


def test_lines_without_special_tokens(tmp_path: Path) -> None:
    corpus = load_corpus(lines(tmp_path / "a.jsonl", "ab", "", "abcdefgh", "é"), BYTES, 4)
    rows = [(ids.tolist(), labels.tolist()) for ids, labels in all_samples(corpus)]
    none = [IGNORED] * 4
    assert rows[0] == ([97, 98, 0, 0], [98, *none[1:]])
    assert rows[1] == ([0] * 4, none)
    assert rows[2] == ([*b"abcd"], [*b"bcd", IGNORED])
    assert rows[3] == ([0xC3, 0xA9, 0, 0], [0xA9, *none[1:]])
    assert corpus.bytes_per_token == 1.0


def test_blank_lines_are_no_samples_and_the_last_needs_no_newline(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "A.JSONL", '\n{"text": "ab"}\r\n \n{"text": "cd", "n": 1}'), BYTES, 4)
    assert [bytes(ids.tolist()) for ids, _ in all_samples(corpus)] == [b"ab\0\0", b"cd\0\0"]


def test_held_out_lines_are_the_last(tmp_path: Path) -> None:
    corpus = load_corpus(lines(tmp_path / "a.jsonl", *(f"{i:03}" for i in range(100))), BYTES, 4)
    rows = [bytes(ids.tolist()[:3]).decode() for ids, _ in all_samples(corpus)]
    assert rows == [f"{i:03}" for i in range(100)]
    assert (len(corpus.train), len(corpus.heldout)) == (95, 5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"line 3 is not JSON \(Expecting ',' delimiter at column 13\)"),
        ("1" * 5000, "line 3 is not JSON"),
        ("[" * 100000, "line 3 is not JSON"),
        ('{"txt": "a"}', 'line 3 has no "text"'),
        ('"text"', "line 3 is a JSON str, not an object"),
        ('{"text": 7}', "line 3 has a .text. of type int"),
        ('{"text": null}', "line 3 has a .text. of type NoneType"),
        (r'{"text": "\ud800"}', "line 3 has a .text. with half a surrogate pair"),
        (b'{"text": "\xff"}', r"line 3 is not UTF-8: byte 0xff at offset 28"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + raw + b'\n{"text": "good"}\n')
    with pytest.raises(TronError, match=message) as error:
        load_corpus(path, BYTES, 8)
    assert "--data" in error.value.fix
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "0 samples"), (["abc"], "1 samples"), (["", "a", "abc"], "train on"), (["abc", "abc", "a"], "hold out")],
)
def test_too_few_usable_lines(tmp_path: Path, texts: list[str], message: str) -> None:
    with pytest.raises(TronError, match=message):
        load_corpus(write(lines(tmp_path / "a.jsonl", *texts), (tmp_path / "a.jsonl").read_text() + "\n"), BYTES, 4)


def test_no_room_in_a_line_sample(tmp_path: Path, minimind: Tokenizer) -> None:
    path = lines(tmp_path / "a.jsonl", "ab", "cd")
    assert len(load_corpus(path, minimind, 3).train) == 1
    for tokenizer, seq_len, least in ((minimind, 2, 3), (BYTES, 1, 2)):
        with pytest.raises(TronError, match=f"seq_len={seq_len} .*--seq-len {least}"):
            load_corpus(path, tokenizer, seq_len)


# Refused for any file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "gone.txt does not exist"),
        (".", None, "is not a file"),
        ("a.txt", "", "a.txt is empty"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", "text", r"ends in \.csv"),
        ("a", "text", "ends in nothing"),
        ("a.txt", b"abc\nd\xffe", "not UTF-8: byte 0xff at offset 5"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(TronError, match=message) as error:
        load_corpus(tmp_path / name, BYTES, 2)
    assert "--data" in error.value.fix
    assert "\n" not in str(error.value)


def test_utf8_offset_counts_from_the_file_not_the_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE_BYTES", 8)
    with pytest.raises(TronError, match="offset 1003"):
        load_corpus(write(tmp_path / "a.txt", b"123456789\n" * 100 + b"abc\xff"), BYTES, 2)


# Batch t


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 12), st.integers(1, 30), st.integers(-5, 2**64), st.data())
def test_each_epoch_is_a_permutation_whatever_the_call_order(count: int, size: int, seed: int, data: st.DataObject) -> None:
    samples = numbered(count)
    steps = -(-3 * count // size)
    shuffled = data.draw(st.permutations(range(steps)))
    batches = {t: batch_at(samples, t, size, seed).ids_BS[:, 0].tolist() for t in shuffled}
    drawn = [i for t in range(steps) for i in batches[t]]
    for epoch in range(3):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert drawn[epoch * count : (epoch + 1) * count] == order(count, seed, epoch).tolist()
    order.cache_clear()
    assert batch_at(samples, shuffled[0], size, seed).ids_BS[:, 0].tolist() == batches[shuffled[0]]


def test_order_depends_on_seed_and_epoch_and_is_kept_over_versions() -> None:
    distinct = {tuple(order(50, seed, epoch)) for seed in (0, 1, 2**32, 1 + 5 * 2**32) for epoch in (0, 1, 5)}
    assert len(distinct) == 12
    assert order(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    with pytest.raises(ValueError, match="read-only"):
        order(8, 42, 0)[0] = 1


def test_one_sample_and_a_far_step() -> None:
    assert batch_at(numbered(1), 3, 4, seed=0).ids_BS.tolist() == [[0, 1]] * 4
    far = batch_at(numbered(5), 10**12, 5, seed=0)
    assert sorted(far.ids_BS[:, 0].tolist()) == [0, 1, 2, 3, 4]
    assert far.labels_BS.shape == (5, 2)
    assert far.ids_BS.dtype == far.labels_BS.dtype == torch.int64


def test_a_run_of_more_than_one_epoch_sees_each_sample_equally(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.txt", "".join(f"{i:04}" for i in range(43))), BYTES, 4)
    count = len(corpus.train)
    rows = torch.cat([batch_at(corpus.train, t, 3, seed=1).ids_BS for t in range(count)])
    seen: dict[tuple[int, ...], int] = {}
    for row in rows.tolist():
        seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    assert set(seen.values()) == {3}
    assert len(seen) == count


# Held-out batches


def test_heldout_batches_have_one_shape_and_a_fixed_order() -> None:
    batches = list(heldout_batches(numbered(5), 2, None))
    assert [b.ids_BS.tolist() for b in batches] == [[[0, 1], [1, 1]], [[2, 1], [3, 1]], [[4, 1], [0, 0]]]
    assert batches[-1].labels_BS.tolist() == [[1, 1], [IGNORED, IGNORED]]
    assert [len(list(heldout_batches(numbered(5), 2, limit))) for limit in (0, 1, 2, 3, 9)] == [0, 1, 2, 3, 3]


def test_a_batch_is_frozen() -> None:
    batch = Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.ids_BS = batch.labels_BS  # type: ignore[misc]


def test_a_byte_order_mark_before_the_first_line_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\n{"text": "def"}\n')
    corpus = load_corpus(tmp_path / "a.jsonl", BYTES, 4)
    assert corpus.train.sample(0)[0].tolist() == [*b"abc", 0]


def test_a_line_that_is_no_object_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[1, 2]\n")
    with pytest.raises(TronError, match="line 1 is a JSON list, not an object"):
        load_corpus(tmp_path / "a.jsonl", BYTES, 4)
