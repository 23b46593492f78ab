"""What the model promises on every mesh beside being Qwen3: padding that reaches nothing, names, refusals, copies, causality."""

from itertools import product

import pytest
import torch
from torch import Tensor

from minimind_tron.collectives import gather_copies, gather_whole
from minimind_tron.config import OptimizerConfig
from minimind_tron.errors import TronError
from minimind_tron.layout import layout_of
from minimind_tron.mesh import Mesh
from minimind_tron.model import Model, rotary_angles
from minimind_tron.optim import build_adamw
from minimind_tron.parallel.vocab import check_ids
from minimind_tron.step import compute_gradients, train_step
from minimind_tron.tokens import Batch
from minimind_tron.topology import StrategyConfig
from tests.meshes import SIZES, STRATEGIES, make_model, random_batch, tiny, tp_mesh

SWITCHES = [
    StrategyConfig(sequence_parallel=sp, vocab_parallel=vp, sp_recompute=again, async_communication=hidden)
    for sp, vp, again, hidden in product((False, True), repeat=4)
    if sp or again
]


# The sequence's padding


def loss_and_gradients(strategy: StrategyConfig, batch: Batch, tied: bool) -> tuple[float, dict[str, Tensor]]:
    model = make_model(tiny(tie_word_embeddings=tied), strategy)
    loss, _ = compute_gradients(model, batch, batch.ids_BS.shape[0])
    return loss, {name: gather_whole(weight.grad, layout_of(weight)) for name, weight in model.named_parameters()}


def padded_by(strategy: StrategyConfig, seq_len: int) -> int:
    model = Model(tiny(), tp_mesh(), strategy)
    return model.padded(torch.zeros(seq_len, 1, dtype=torch.long), 0).shape[0] - seq_len


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seq_len", [15, 1])
def test_the_sequence_is_padded_for_sp_only(pool, seq_len: int, size: int) -> None:
    assert pool(size).run(padded_by, STRATEGIES["sp"], seq_len) == [-seq_len % size] * size
    assert pool(size).run(padded_by, STRATEGIES["tp"], seq_len) == [0] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(name for name, on in s.model_dump().items() if on) or "none")
def test_loss_and_gradients_are_the_dense_ones_without_padding(pool, switches: StrategyConfig, tied: bool, size: int) -> None:
    batch = random_batch(2, 15, tiny().vocab_size)
    batch.ids_BS[batch.ids_BS == 0] = 1  # id 0 is what pads: its embedding's gradient must be nothing but the head's, or nothing
    dense_loss, dense = loss_and_gradients(StrategyConfig(), batch, tied)
    assert tied or dense["model.embed_tokens.weight"][0].eq(0).all()
    whole = torch.cat([gradient.flatten() for gradient in dense.values()]).norm()
    for loss, gradients in pool(size).run(loss_and_gradients, switches, batch, tied):
        assert loss == pytest.approx(dense_loss, rel=1e-12)
        assert gradients.keys() == dense.keys()
        apart = {name: float((gradients[name] - dense[name]).norm() / max(dense[name].norm(), 1e-3 * whole)) for name in dense}
        assert max(apart.values()) < 1e-11, apart
        assert tied or gradients["model.embed_tokens.weight"][0].eq(0).all()


# Refusals


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([0, 36], [36, -100], None),
        ([0, 37], None, "token id 37 is outside the vocab of 37"),
        ([-1, 99], None, "token id -1 is outside the vocab of 37"),
        ([0, 1], [1, 37], "label 37 is neither -100 nor inside the vocab of 37"),
        ([0, 1], [-1, -100], "label -1 is neither -100 nor inside the vocab of 37"),
        ([-100, 1], [0, 0], "token id -100 is outside the vocab of 37"),
        ([], [], None),
    ],
)
def test_check_ids(ids: list[int], labels: list[int] | None, message: str | None) -> None:
    given = torch.tensor(ids, dtype=torch.long), None if labels is None else torch.tensor(labels, dtype=torch.long)
    if message is None:
        check_ids(*given, 37)
        return
    with pytest.raises(TronError) as error:
        check_ids(*given, 37)
    assert str(error.value) == f"{message}; change --vocab-size"


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, 1, dtype=torch.long),
        torch.zeros(4, dtype=torch.long),
        torch.zeros(4, 1, 1, dtype=torch.long),
        torch.zeros(4, 1),
        torch.zeros(4, 1, dtype=torch.bool),
    ],
    ids=["no token", "one dim", "three dims", "fractions", "booleans"],
)
def test_what_is_no_batch_of_tokens_is_refused(ids: Tensor) -> None:
    model, good = make_model(tiny()), torch.zeros(4, 1, dtype=torch.long)
    for attempt in (lambda: model.logits(ids), lambda: model(ids, ids), lambda: model(good, ids)):
        with pytest.raises(TronError, match=r"integers \[S, B\] with a token a sample are wanted"):
            attempt()
    for labels in (good[:3], good.expand(-1, 2)):
        with pytest.raises(TronError, match=r"labels of torch\.int64"):
            model(good, labels)
    assert model.logits(good[:, :0]).shape == (4, 0, 37), "a batch of no sample is one"


@pytest.mark.parametrize("mask", [torch.ones(1, 4, dtype=torch.bool), torch.ones(4, 1), torch.ones(3, 1, dtype=torch.long)])
def test_a_mask_of_another_kind_than_the_ids_is_refused(mask: Tensor) -> None:
    model, ids = make_model(tiny()), torch.zeros(4, 1, dtype=torch.long)
    for attempt in (lambda: model.logits(ids, mask), lambda: model(ids, ids, mask)):
        with pytest.raises(TronError, match=r"a mask of torch.* was given with ids of \(4, 1\)"):
            attempt()


def refusals(vocab_parallel: bool, sequence_parallel: bool) -> list[str]:
    """What forward, logits and a step say to an id and a label that are not in the vocab."""
    model = make_model(tiny(), StrategyConfig(vocab_parallel=vocab_parallel, sequence_parallel=sequence_parallel))
    good, bad = torch.zeros(4, 1, dtype=torch.long), torch.tensor([[0], [0], [37], [0]])
    said = []
    for act in (
        lambda: model(bad, good),
        lambda: model(good, bad),
        lambda: model.logits(bad),
        lambda: compute_gradients(model, Batch(bad.T, good.T), 1),
    ):
        with pytest.raises(TronError) as error:
            act()
        said.append(error.value.what)
    return said


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_parallel", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ids_and_labels_outside_the_vocab_are_refused(pool, size: int, vocab_parallel: bool, sequence_parallel: bool) -> None:
    token, label = "token id 37 is outside the vocab of 37", "label 37 is neither -100 nor inside the vocab of 37"
    assert pool(size).run(refusals, vocab_parallel, sequence_parallel) == [[token, label, token, token]] * size


# Names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameter_names_are_hugging_faces(tied: bool, bias: bool) -> None:
    from transformers import Qwen3ForCausalLM

    from minimind_tron.interop import hugging_face_config

    config = tiny(tie_word_embeddings=tied, attention_bias=bias)
    with torch.device("meta"):
        theirs = Qwen3ForCausalLM(hugging_face_config(config))
    ours = {name: weight.shape for name, weight in Model(config, device="meta").named_parameters()}
    assert ours == {name: weight.shape for name, weight in theirs.named_parameters()}


def names_and_shapes(strategy: StrategyConfig) -> list[tuple[str, tuple[int, ...]]]:
    model = Model(tiny(tie_word_embeddings=False, attention_bias=True), tp_mesh(), strategy)
    return [(name, layout_of(weight).shape) for name, weight in model.named_parameters()]


def test_names_and_whole_shapes_are_the_same_on_every_mesh(pool) -> None:
    dense = names_and_shapes(StrategyConfig())
    for switches in (StrategyConfig(), StrategyConfig(sequence_parallel=True, vocab_parallel=True)):
        assert pool(4).run(names_and_shapes, switches) == [dense] * 4


# Copies


def copies_after_steps(switches: StrategyConfig, kv_heads: int) -> tuple[list[str], int]:
    """The weights whose copies differ after three steps, and how many were shared by ranks."""
    config = tiny(num_key_value_heads=kv_heads, attention_bias=True)
    model, axis = make_model(config, switches, torch.float32), tp_mesh().tp
    start = [weight.detach().clone() for weight in model.parameters()]
    optimizer = build_adamw(model, OptimizerConfig(learning_rate=1e-2))
    for t in range(3):
        train_step(model, optimizer, random_batch(2, 7, config.vocab_size, seed=t), 1, clip_norm=0.5)
    assert not any(torch.equal(weight, before) for weight, before in zip(model.parameters(), start, strict=True))
    differ, shared = [], 0
    for name, weight in model.named_parameters():
        layout = layout_of(weight)
        parts = layout.cut.parts if layout.cut else 1
        copies = gather_copies(weight.detach(), axis)
        group = axis.size // parts
        shared += group > 1
        if any(not torch.equal(copies[rank], copies[rank // group * group]) for rank in range(axis.size)):
            differ.append(name)
    return differ, shared


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["tp", "sp-recompute-async"])
def test_copies_stay_bit_equal(pool, name: str, kv_heads: int, size: int) -> None:
    switches = STRATEGIES[name].model_copy(update={"vocab_parallel": kv_heads == 1})
    ranks = pool(size).run(copies_after_steps, switches, kv_heads)
    # Norms, the o bias, the whole embedding, and k and v where heads are fewer than ranks.
    shared = 2 * (4 + 1) + 1 + (kv_heads != 1) + (2 * 4 if kv_heads < size else 0)
    assert ranks == [([], shared)] * size


# Logits


def logits_of(switches: StrategyConfig, ids_SB: Tensor, dtype: torch.dtype) -> Tensor:
    return make_model(tiny(), switches, dtype).logits(ids_SB)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sequence_parallel", "vocab_parallel"), [*product((False, True), repeat=2)])
def test_logits_are_whole_on_every_rank(pool, sequence_parallel: bool, vocab_parallel: bool, size: int) -> None:
    ids_SB = random_batch(2, 7, 37).ids_BS.T
    switches = StrategyConfig(sequence_parallel=sequence_parallel, vocab_parallel=vocab_parallel)
    dense = logits_of(StrategyConfig(), ids_SB, torch.float64)
    assert dense.shape == (7, 2, 37)
    for logits in pool(size).run(logits_of, switches, ids_SB, torch.float64):
        torch.testing.assert_close(logits, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_a_later_token_changes_no_earlier_logit(pool, size: int) -> None:
    ids_SB = random_batch(2, 8, 37).ids_BS.T.contiguous()
    changed_SB = ids_SB.clone()
    changed_SB[5] = (ids_SB[5] + 1) % 37
    switches = StrategyConfig(sequence_parallel=True, vocab_parallel=True)
    before, after = (pool(size).run(logits_of, switches, ids, torch.float64) for ids in (ids_SB, changed_SB))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:5], other[:5])
        assert not (one[5:] == other[5:]).all(-1).any()


def test_loss_is_that_of_the_logits() -> None:
    model, batch = make_model(tiny(), mesh=Mesh()), random_batch(2, 7, 37)
    batch.labels_BS[0, :4] = -100
    logits_SBV = model.logits(batch.ids_BS.T)
    wanted = (
        -logits_SBV.log_softmax(-1)
        .transpose(0, 1)[batch.labels_BS != -100]
        .gather(1, batch.labels_BS[batch.labels_BS != -100].unsqueeze(1))
    )
    assert model(batch.ids_BS.T, batch.labels_BS.T).item() == pytest.approx(wanted.sum().item(), rel=1e-13)


# bfloat16


def bfloat16_run(switches: StrategyConfig) -> tuple[torch.dtype, float, set[torch.dtype], bool]:
    model, batch = make_model(tiny(), switches, torch.bfloat16), random_batch(2, 7, 37)
    loss = model(batch.ids_BS.T, batch.labels_BS.T)
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    return loss.dtype, loss.item(), {g.dtype for g in gradients}, all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("switches", [StrategyConfig(), StrategyConfig(sequence_parallel=True, vocab_parallel=True)])
def test_bfloat16_runs(pool, switches: StrategyConfig, size: int) -> None:
    model, batch = make_model(tiny(), mesh=Mesh()), random_batch(2, 7, 37)
    want = model(batch.ids_BS.T, batch.labels_BS.T).item()
    for dtype, loss, gradient_dtypes, finite in pool(size).run(bfloat16_run, switches):
        assert (dtype, gradient_dtypes, finite) == (torch.float32, {torch.bfloat16}, True)
        assert loss == pytest.approx(want, rel=1e-2)


# Rotary positions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_angles(dtype: torch.dtype) -> None:
    cos, sin = rotary_angles(torch.tensor([0, 1, 30000]), 4, 1e4, dtype)
    assert cos.shape == sin.shape == (3, 1, 1, 4)
    assert cos.dtype == sin.dtype == dtype
    exact = torch.tensor([[0.0, 0.0], [1.0, 0.01], [30000.0, 300.0]], dtype=torch.float64)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-2, torch.bfloat16: 1e-2}[dtype]
    for found, wanted in ((cos, exact.cos()), (sin, exact.sin())):
        torch.testing.assert_close(found[:, 0, 0].double(), torch.cat((wanted, wanted), -1), rtol=0, atol=tolerance)
