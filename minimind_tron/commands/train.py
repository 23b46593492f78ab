"""train: text in, a language model out."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from minimind_tron.collectives import settle
from minimind_tron.config_files import to_toml
from minimind_tron.errors import TronError
from minimind_tron.figures import loss_curve
from minimind_tron.interop import save_hugging_face
from minimind_tron.mesh import Mesh, build_mesh
from minimind_tron.model import Model, build_model, initialise
from minimind_tron.parallel.pipeline import describe
from minimind_tron.run_config import TrainConfig, describe_numbers, trace_files
from minimind_tron.runtime import World, say
from minimind_tron.sampling import Sample, greedy, readable
from minimind_tron.tokenizer import Tokenizer, check_tokenizer_fits, load_tokenizer
from minimind_tron.tokens import Corpus, Samples, load_corpus
from minimind_tron.topology import describe_switches
from minimind_tron.trainer import References, Trained, count_steps, train, unigram_entropy


@dataclass(frozen=True)
class TrainResult:
    """What a run came to: the last step's loss (nats a token), the last held-out loss, wall time of the loop, and its files.

    ``unlabelled`` steps had no valid label, ``skipped`` ones no finite gradients; neither changed anything.
    ``files`` are those that global rank 0 wrote, the same list on every rank; ``sample`` is None where none was asked for.
    """

    steps: int
    unlabelled: int
    skipped: int
    loss: float
    heldout_nats_per_token: float
    heldout_nats_per_byte: float
    tokens: int
    seconds: float
    sample: Sample | None
    files: tuple[Path, ...]
    exit_code: int = 0


def check(config: TrainConfig) -> None:
    """Refuse data and a tokenizer that no rank could use; the text is read as bytes, which takes no time worth mentioning.

    Raises: TronError.
    """
    check_tokenizer_fits(load_tokenizer(config.tokenizer), config.model.vocab_size)
    load_corpus(config.data, load_tokenizer(None), config.batch.seq_len)


def run(config: TrainConfig, world: World) -> TrainResult:
    """Train, measure, sample and save; every rank calls it.

    Raises: TronError for data, a tokenizer or an output folder that will not do, and for a run that diverges.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    check_tokenizer_fits(tokenizer, config.model.vocab_size)
    corpus = load_corpus(config.data, tokenizer, config.batch.seq_len)
    mesh = build_mesh(config.mesh, world.rank, world.size, world.timeout_s)
    claim_output(config, mesh)
    model = build_model(config, mesh, world.device)
    initialise(model, config.seed)
    references = measure_references(corpus, tokenizer, config)
    introduce(config, mesh, corpus, references)
    metrics, curve = config.output_dir / "metrics.jsonl", config.output_dir / "loss.png"
    trained = train(model, corpus, config, references, metrics if mesh.rank == 0 else None)
    if mesh.rank == 0:
        loss_curve(metrics, curve)
    sample = take_sample(model, tokenizer, config)
    export(model, tokenizer, config.output_dir / "model")
    files = [metrics, curve, config.output_dir / "config.toml", config.output_dir / "model"]
    if sample is not None:
        files.append(config.output_dir / "sample.txt")
        if mesh.rank == 0:
            files[-1].write_text(sample.text, encoding="utf-8")
    if config.trace is not None and trained.traced:
        files += trace_files(config.trace)
    return _conclude(config, trained, references, sample, tuple(files))


def claim_output(config: TrainConfig, mesh: Mesh) -> None:
    """Make the output folder and write the resolved config into it; rank 0 does it, and if it cannot, no rank goes on.

    The check for another run's files is made by rank 0 alone: another rank could come after it and find this very run's.
    Raises: TronError, the same on every rank.
    """

    def claim() -> None:
        config.check_before_start()
        try:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            (config.output_dir / "config.toml").write_text(to_toml(config), encoding="utf-8")
        except OSError as error:
            what = f"output_dir={config.output_dir} cannot be written ({error.strerror})"
            raise TronError(what, "change --output-dir") from None

    settle(claim, mesh)


def measure_references(corpus: Corpus, tokenizer: Tokenizer, config: TrainConfig) -> References:
    """The losses, in nats a byte, of two models that have learned nothing, on the text that held-out losses are measured on."""
    samples = min(len(corpus.heldout), config.eval_batches * config.batch.micro_batch_size)
    text = heldout_text(corpus.heldout, samples, tokenizer)
    return References(math.log(config.model.vocab_size) / corpus.bytes_per_token, unigram_entropy(text))


def heldout_text(heldout: Samples, samples: int, tokenizer: Tokenizer) -> bytes:
    """The bytes of the labels of the first held-out samples."""
    labels = torch.cat([heldout.sample(i)[1] for i in range(samples)])
    ids = labels[labels >= 0].tolist()
    if tokenizer.hf is None:
        # These ids are the bytes; decoding would replace the characters that a window cuts in two.
        return bytes(ids)
    special = set(tokenizer.hf.all_special_ids)
    return tokenizer.decode(i for i in ids if i not in special).encode("utf-8", "replace")


def introduce(config: TrainConfig, mesh: Mesh, corpus: Corpus, references: References) -> None:
    """Say what is about to run."""
    degrees = " x ".join(f"{axis.name} {axis.size}" for axis in (mesh.dp, mesh.pp, mesh.cp, mesh.tp))
    batch, steps = config.batch, count_steps(config, len(corpus.train))
    say(f"model       {config.model.num_parameters:,} parameters, {describe_numbers(config)}")
    say(f"mesh        {degrees}; {describe_switches(config.mesh, config.strategy)}")
    if pipeline := describe(config.model, config.pipeline, config.mesh.pp_size):
        say(f"pipeline    {pipeline}")
    say(f"data        {corpus.description}")
    say(f"training    {steps:,} steps of {batch.samples} x {batch.seq_len} tokens, in microbatches of {batch.micro_batch_size}")
    say(f"references  {_references(references)}")


def _references(references: References) -> str:
    return f"uniform {references.uniform:.3f}, byte frequencies alone {references.byte_unigram:.3f} nats/byte"


def take_sample(model: Model, tokenizer: Tokenizer, config: TrainConfig) -> Sample | None:
    """The prompt and what the model makes of it, or None where no sample is wanted."""
    prompt = tokenizer.encode(config.sample_prompt)
    if not (config.sample_length and prompt):
        return None
    continuation = greedy(
        model,
        beginning(tokenizer, config.data) + prompt,
        config.sample_length,
        context=config.batch.seq_len,
        known=tokenizer.vocab_size,
        stop_id=tokenizer.eos_id,
    )
    return readable(prompt + continuation, tokenizer)


def beginning(tokenizer: Tokenizer, data: Path | None) -> list[int]:
    """What stands before every text of the data: bos for the lines of a .jsonl, where the tokenizer has one, and nothing else."""
    lines = data is not None and data.suffix.lower() == ".jsonl"
    return [tokenizer.bos_id] if lines and tokenizer.bos_id is not None else []


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model and tokenizer as one Hugging Face folder.

    Cost: that of ``save_hugging_face``.
    """
    bos, eos, pad = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    save_hugging_face(model, folder, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    if model.mesh.rank == 0:
        tokenizer.save(folder)


def _conclude(
    config: TrainConfig, trained: Trained, references: References, sample: Sample | None, files: tuple[Path, ...]
) -> TrainResult:
    heldout, speed = trained.heldout, trained.tokens / max(trained.seconds, 1e-9)
    if sample is not None:
        _show_sample(sample)
    elif config.mesh.cp_size > 1:
        say("sample      none: text is not generated under context parallelism")
    say(f"trained     {trained.steps:,} steps, {trained.tokens:,} tokens, {trained.seconds:.0f} s, {speed:,.0f} tokens/s")
    if trained.skipped:
        say(f"skipped     {trained.skipped:,} of these steps, whose gradients were not finite")
    say(f"held out    {heldout.nats_per_byte:.4f} nats/byte, {heldout.nats_per_token:.4f} nats/token; {_references(references)}")
    say("wrote       " + "\n            ".join(map(str, files)))
    losses = (trained.loss, heldout.nats_per_token, heldout.nats_per_byte)
    return TrainResult(trained.steps, trained.unlabelled, trained.skipped, *losses, trained.tokens, trained.seconds, sample, files)


def _show_sample(sample: Sample) -> None:
    say("sample      " + sample.text.replace("\n", "\n            "))
    if sample.left_out:
        say(f"            ({sample.left_out} tokens at the end were no whole character and are left out)")
    if sample.broken:
        say(f"            ({sample.broken} places are not valid UTF-8 and are shown as \ufffd)")
