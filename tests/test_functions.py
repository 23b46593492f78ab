"""Every autograd Function of the package: its derivative at size 1, its adjoint over all ranks, and whole regions at size 2.

The adjoint of a collective is no local derivative, so over several ranks the identity <y, A x> = <A* y, x> is held instead: what is
logically one tensor counts once, what each rank has a part or a copy of its own of counts on each.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, gradcheck
from torch.autograd.gradcheck import GradcheckError

import minimind_tron
from minimind_tron import collectives
from minimind_tron.collectives import AllToAll, CopyIn, GatherIn, ScatterOut, SumOut, copy_in, shard, sum_out
from minimind_tron.layout import Cut
from minimind_tron.mesh import Axis
from minimind_tron.model import choose_seams
from minimind_tron.parallel import linear, ring
from minimind_tron.parallel.context import SequenceMap, attend_by_heads, attend_gathered, attend_regathered
from minimind_tron.parallel.overlap import HiddenReduce, HiddenRegathered, HiddenScatter, Regathered
from minimind_tron.parallel.sequence import RowScatter
from minimind_tron.parallel.tensor import RowSum
from minimind_tron.parallel.vocab import VocabCrossEntropy, cross_entropy, look_up
from tests.meshes import SIZES, STRATEGIES, randn, tp_mesh

S, B, D, F1, F2 = 4, 2, 3, 8, 4  # S, F1 and F2 are cut over up to 4 ranks


@dataclass(frozen=True)
class Linear:
    """A linear map between ranks: which of its sides is one tensor that all ranks hold, and its value from everybody's inputs."""

    apply: type[Function]
    one_input: bool
    one_output: bool
    oracle: Callable[[list[Tensor], int], Tensor]


LINEAR = {
    "CopyIn": Linear(CopyIn, True, False, lambda xs, rank: xs[rank]),
    "SumOut": Linear(SumOut, False, True, lambda xs, rank: torch.stack(xs).sum(0)),
    "GatherIn": Linear(GatherIn, False, False, lambda xs, rank: torch.cat(xs)),
    "ScatterOut": Linear(ScatterOut, False, False, lambda xs, rank: torch.stack(xs).sum(0).chunk(len(xs))[rank]),
    "AllToAll": Linear(AllToAll, False, False, lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs])),
}
# Linear in x for fixed weights: entries that several column linears share. True: all ranks feed the same x.
ENTRIES = {
    "HiddenReduce": (HiddenReduce, True),
    "HiddenScatter": (HiddenScatter, False),
    "Regathered": (Regathered, False),
    "HiddenRegathered": (HiddenRegathered, False),
}
# Linear in x for a fixed weight: exits through a row linear. True: all ranks get the same sum.
EXITS = {"RowSum": (RowSum, True), "RowScatter": (RowScatter, False)}
# Attention of this rank's tokens, keys of other ranks included.
ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, SequenceMap], Tensor]] = {
    "CausalAttention": attend_by_heads,
    "GatheredAttention": attend_gathered,
    "RegatheredAttention": attend_regathered,
    "RingAttention": ring.attend,
}


def found_functions() -> set[str]:
    for module in pkgutil.walk_packages(minimind_tron.__path__, "minimind_tron."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = set(), [Function]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("minimind_tron."):
                found.add(kind.__name__)
    return found


def test_no_function_is_without_a_test() -> None:
    others = {"VocabCrossEntropy", "Multiply", "LookUp"}
    assert found_functions() == LINEAR.keys() | ENTRIES.keys() | EXITS.keys() | ATTENTIONS.keys() | others


# Size 1


def local(shape: tuple[int, ...], seed: int) -> Tensor:
    return randn(*shape, seed=seed).requires_grad_()


@pytest.mark.parametrize("name", LINEAR)
def test_gradcheck_of_linear_maps(name: str) -> None:
    x = local((S, B, D), 0)
    assert gradcheck(lambda x: LINEAR[name].apply.apply(x, Axis("tp")), x)
    assert torch.equal(LINEAR[name].apply.apply(x, Axis("tp")), x)


@pytest.mark.parametrize("name", ENTRIES)
def test_gradcheck_of_entries(name: str) -> None:
    entry, _ = ENTRIES[name]
    tensors = (local((S, B, D), 0), local((F1, D), 1), local((F1,), 2), local((F2, D), 3))
    assert gradcheck(lambda x, w1, b1, w2: entry.apply(x, Axis("tp"), w1, b1, w2, None), tensors)


@pytest.mark.parametrize("name", EXITS)
def test_gradcheck_of_exits(name: str) -> None:
    exit_, _ = EXITS[name]
    tensors = (local((S, B, F1), 0), local((D, F1), 1))
    assert gradcheck(lambda x, w: exit_.apply(x, w, Axis("tp")), tensors)
    assert torch.equal(exit_.apply(*tensors, Axis("tp")), F.linear(*tensors))


@pytest.mark.parametrize("bias", [None, local((F1,), 2)], ids=["no bias", "bias"])
def test_gradcheck_of_multiply(bias: Tensor | None) -> None:
    tensors = (local((S, B, D), 0), local((F1, D), 1), bias)
    assert gradcheck(linear.multiply, tensors)
    assert torch.equal(linear.multiply(*tensors), F.linear(*tensors))


def test_gradcheck_of_look_up() -> None:
    rows = torch.tensor([[0, 4], [2, 4]])
    assert gradcheck(lambda table: linear.look_up(rows, table), local((5, D), 1))


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention written out. Shapes: [S, B, n, H], [S, B, k, H] twice -> [S, B, n, H]."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbnh,tbnh->bnst", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("bnst,tbnh->sbnh", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def attended() -> list[Tensor]:
    """q, k and v of 8 tokens, 4 query heads and 2 kv heads."""
    return [local((8, 1, heads, 2), seed) for seed, heads in enumerate((4, 2, 2))]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradcheck_of_attention(name: str) -> None:
    attend = partial(ATTENTIONS[name], sequence=SequenceMap(Axis("cp")))
    assert gradcheck(attend, attended())
    torch.testing.assert_close(attend(*attended()), dense_attention(*attended()), rtol=1e-13, atol=1e-13)


# Weight gradients put off


PUT_OFF: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Multiply": linear.multiply,
    "LookUp": lambda x, w, b: linear.look_up(x.detach().argmax(-1), w) * x + b[: x.shape[-1]],
    **{name: lambda x, w, b, entry=entry: entry.apply(x, Axis("tp"), w, b)[0] for name, (entry, _) in ENTRIES.items()},
    **{name: lambda x, w, b, exit_=exit_: exit_.apply(x, w, Axis("tp")) + b for name, (exit_, _) in EXITS.items()},
}


@pytest.mark.parametrize("name", PUT_OFF)
def test_what_is_put_off_comes_out_the_same(name: str) -> None:
    x, w, b = (randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(S, B, D), (F1, D), (F1,)]))
    grads = []
    for put_off in (False, True):
        for step in range(2):
            y = PUT_OFF[name](x, w, b)
            if put_off:
                before = None if w.grad is None else w.grad.clone()
                with linear.putting_off() as works:
                    y.backward(randn(*y.shape, seed=9 + step))
                assert w.grad is None if before is None else torch.equal(w.grad, before), "nothing is added before its time"
                assert len(works) == 1
                works[0]()
            else:
                y.backward(randn(*y.shape, seed=9 + step))
        grads.append([t.grad.clone() for t in (x, w, b)])
        for t in (x, w, b):
            t.grad = None
    assert all(torch.equal(now, later) for now, later in zip(*grads, strict=True))


def test_putting_off_twice_is_refused_and_ends_with_an_error() -> None:
    with pytest.raises(AssertionError, match="already"), linear.putting_off(), linear.putting_off():
        pass
    assert not linear.is_putting_off()


def test_gradcheck_of_cross_entropy() -> None:
    labels = torch.tensor([[0, 4], [-100, 2]])
    assert gradcheck(lambda x: VocabCrossEntropy.apply(x, labels, Cut(0, Axis("tp"), 1), 5), local((2, 2, 5), 0))


# The adjoint identity


def adjoint_products(name: str) -> tuple[Tensor, Tensor]:
    """This rank's share of <y, A x> and of <A* y, x>; its forward is held against the oracle on the way."""
    axis, case = tp_mesh().tp, LINEAR[name]
    xs = [randn(S, B, D, seed=0 if case.one_input else rank) for rank in range(axis.size)]
    x = xs[axis.rank].clone().requires_grad_()
    out = case.apply.apply(x, axis)
    torch.testing.assert_close(out, case.oracle(xs, axis.rank), rtol=1e-14, atol=1e-14)
    y = randn(*out.shape, seed=100 if case.one_output else 100 + axis.rank)
    out.backward(y)
    first = axis.rank == 0
    return (y * out).sum().detach() * (first or not case.one_output), (x.grad * x).sum().detach() * (first or not case.one_input)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LINEAR)
def test_adjoint_of_linear_maps(pool, name: str, size: int) -> None:
    forward, backward = (sum(products).item() for products in zip(*pool(size).run(adjoint_products, name), strict=True))
    assert abs(forward) > 0.1
    assert forward == pytest.approx(backward, rel=1e-12)


def entry_on_a_rank(name: str) -> dict[str, object]:
    """An entry's adjoint products, and its largest distances from dense autograd on whole tensors."""
    axis = tp_mesh().tp
    entry, one_input = ENTRIES[name]
    whole = [randn(*shape, seed=seed) for seed, shape in enumerate([(S, B, D), (F1, D), (F1,), (F2, D)])]
    mine = [whole[0] if one_input else shard(whole[0], axis), *(shard(w, axis) for w in whole[1:])]
    x, w1, b1, w2 = (tensor.clone().requires_grad_() for tensor in mine)
    outs = entry.apply(x, axis, w1, b1, w2, None)
    dys = [randn(*out.shape, seed=100 + axis.rank + 10 * i) for i, out in enumerate(outs)]
    torch.autograd.backward(outs, dys)

    dense = [tensor.clone().requires_grad_() for tensor in whole]
    ys = [F.linear(dense[0], dense[1], dense[2]), F.linear(dense[0], dense[3])]
    whole_dys = [torch.cat([randn(*out.shape, seed=100 + r + 10 * i) for r in range(axis.size)], -1) for i, out in enumerate(outs)]
    torch.autograd.backward(ys, whole_dys)
    wanted = [dense[0].grad if one_input else shard(dense[0].grad, axis), *(shard(t.grad, axis) for t in dense[1:])]
    apart = [float((t.grad - want).abs().max()) for t, want in zip((x, w1, b1, w2), wanted, strict=True)]
    apart += [float((out - y.chunk(axis.size, -1)[axis.rank]).detach().abs().max()) for out, y in zip(outs, ys, strict=True)]
    linear_part = [(outs[0] - b1).detach(), outs[1].detach()]
    return {
        "forward": sum(float((dy * out).sum()) for dy, out in zip(dys, linear_part, strict=True)),
        "backward": float((x.grad * x.detach()).sum()) * (axis.rank == 0 or not one_input),
        "apart": max(apart),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ENTRIES)
def test_adjoint_and_weights_of_entries(pool, name: str, size: int) -> None:
    ranks = pool(size).run(entry_on_a_rank, name)
    assert sum(rank["forward"] for rank in ranks) == pytest.approx(sum(rank["backward"] for rank in ranks), rel=1e-12)
    assert max(rank["apart"] for rank in ranks) < 1e-13


def exit_on_a_rank(name: str) -> dict[str, object]:
    """An exit's adjoint products, and its largest distances from dense autograd on whole tensors."""
    axis = tp_mesh().tp
    exit_, one_output = EXITS[name]
    whole_x, whole_w = randn(S, B, F1, seed=0), randn(D, F1, seed=1)
    x, w = (shard(whole.movedim(-1, 0), axis).movedim(0, -1).clone().requires_grad_() for whole in (whole_x, whole_w))
    out = exit_.apply(x, w, axis)
    dy = randn(*out.shape, seed=100 if one_output else 100 + axis.rank)
    out.backward(dy)

    dense_x, dense_w = whole_x.clone().requires_grad_(), whole_w.clone().requires_grad_()
    y = F.linear(dense_x, dense_w)
    y.backward(dy if one_output else torch.cat([randn(*out.shape, seed=100 + rank) for rank in range(axis.size)]))
    wanted = [shard(t.grad.movedim(-1, 0), axis).movedim(0, -1) for t in (dense_x, dense_w)]
    apart = [float((t.grad - want).abs().max()) for t, want in zip((x, w), wanted, strict=True)]
    apart.append(float((out - (y if one_output else shard(y, axis))).detach().abs().max()))
    first = axis.rank == 0
    return {
        "forward": float((dy * out.detach()).sum()) * (first or not one_output),
        "backward": float((x.grad * x.detach()).sum()),
        "apart": max(apart),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXITS)
def test_adjoint_and_weights_of_exits(pool, name: str, size: int) -> None:
    ranks = pool(size).run(exit_on_a_rank, name)
    assert sum(rank["forward"] for rank in ranks) == pytest.approx(sum(rank["backward"] for rank in ranks), rel=1e-12)
    assert max(rank["apart"] for rank in ranks) < 1e-13


# Cross entropy


LABELS = torch.tensor([[0, 4], [-100, 2], [4, 3]])


def cut_logits(whole: Tensor, vocab_size: int, rubbish: float) -> tuple[Cut, Tensor]:
    """This rank's columns, with rubbish in the padded ones."""
    axis = tp_mesh().tp
    cut = Cut(0, axis, axis.size)
    begin, end = cut.rows(vocab_size, cut.piece)
    mine = whole.new_full((*whole.shape[:-1], cut.padded_piece(vocab_size)), rubbish)
    mine[..., : end - begin] = whole[..., begin:end]
    return cut, mine.requires_grad_()


def losses_and_gradient(whole: Tensor, labels: Tensor, rubbish: float) -> tuple[Tensor, Tensor]:
    """Losses of every token, and the gradient of their weighted sum by the whole logits, put together from the ranks'."""
    vocab_size = whole.shape[-1]
    cut, logits = cut_logits(whole, vocab_size, rubbish)
    losses = VocabCrossEntropy.apply(logits, labels, cut, vocab_size)
    losses.backward(randn(*labels.shape, seed=9, dtype=losses.dtype))
    begin, end = cut.rows(vocab_size, cut.piece)
    assert logits.grad[..., end - begin :].eq(0).all(), "padded columns have a gradient"
    columns = collectives.all_gather(logits.grad.movedim(-1, 0), cut.axis).movedim(0, -1)
    return losses.detach(), columns[..., :vocab_size]


def dense_losses(whole: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = whole.clone().requires_grad_()
    valid = labels != -100
    losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * valid
    losses.backward(randn(*labels.shape, seed=9, dtype=losses.dtype))
    return losses.detach(), logits.grad


def logits_named(kind: str) -> tuple[Tensor, Tensor]:
    vocab_size = 3 if kind == "a rank of padding" else 5
    whole, labels = randn(*LABELS.shape, vocab_size, seed=3), LABELS.clamp(max=vocab_size - 1)
    if kind == "extreme":
        whole[0, 0, 1], whole[0, 1, 4], whole[2, 0] = 1e4, -1e4, 1e4
    if kind == "no label":
        labels = torch.full_like(labels, -100)
    return whole, labels


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["plain", "extreme", "a rank of padding", "no label"])
def test_cross_entropy_is_the_dense_one(pool, kind: str, size: int) -> None:
    whole, labels = logits_named(kind)
    want_losses, want_gradient = dense_losses(whole, labels)
    for rubbish in (0.0, 1e5):
        for losses, gradient in pool(size).run(losses_and_gradient, whole, labels, rubbish):
            torch.testing.assert_close(losses, want_losses, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-12)
            assert losses[labels == -100].eq(0).all()
            assert gradient[labels == -100].eq(0).all()


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_logits_have_float32_statistics(pool, size: int) -> None:
    whole = randn(*LABELS.shape, 5, seed=3, dtype=torch.bfloat16)
    want_losses, want_gradient = dense_losses(whole.float(), LABELS)
    for losses, gradient in pool(size).run(losses_and_gradient, whole, LABELS, 0.0):
        assert (losses.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(losses, want_losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient.float(), want_gradient, rtol=2**-8, atol=1e-6)


# Regions between replicated tensors, at size 2. Both ranks perturb the same element of a whole tensor at once, so gradcheck holds.


def mine(whole: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part of a whole weight; the gradient of the whole comes back on every rank."""
    return shard(copy_in(whole, axis).movedim(dim, 0), axis).movedim(0, dim)


def joined(x_sBD: Tensor, axis: Axis) -> Tensor:
    """The whole sequence on every rank, where it counts once."""
    ahead = axis.rank * x_sBD.shape[0]
    behind = (axis.size - 1 - axis.rank) * x_sBD.shape[0]
    return sum_out(F.pad(x_sBD, (0, 0, 0, 0, ahead, behind)), axis)


def check_region(strategy: str) -> None:
    mesh, switches = tp_mesh(), STRATEGIES[strategy]
    axis, seams = mesh.tp, choose_seams(mesh, switches)
    cut_sequence = switches.sequence_parallel

    def region(x: Tensor, w_gate: Tensor, b_gate: Tensor, w_up: Tensor, w_down: Tensor, b_down: Tensor) -> Tensor:
        gate = SimpleNamespace(weight=mine(w_gate, axis), bias=mine(b_gate, axis))
        up = SimpleNamespace(weight=mine(w_up, axis), bias=None)
        bias = copy_in(b_down, axis) if cut_sequence else b_down
        down = SimpleNamespace(weight=mine(w_down, axis, dim=1), bias=bias)
        g, u = seams.columns(mine(x, axis) if cut_sequence else x, (gate, up), axis)
        y = seams.row(F.silu(g) * u, down)
        return joined(y, axis) if cut_sequence else y

    shapes = [(2, 1, 2), (4, 2), (4,), (4, 2), (2, 4), (2,)]
    tensors = [local(shape, seed) for seed, shape in enumerate(shapes)]
    x, w_gate, b_gate, w_up, w_down, b_down = tensors
    dense = F.linear(F.silu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up), w_down, b_down)
    torch.testing.assert_close(region(*tensors), dense, rtol=1e-13, atol=1e-13)
    torch.manual_seed(0)
    assert gradcheck(region, tensors, fast_mode=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradcheck_of_regions(pool, strategy: str) -> None:
    pool(2).run(check_region, strategy)


def check_vocab_regions(strategy: str) -> None:
    """Embedding, and head with loss, over a vocab of 5 that 2 does not divide."""
    mesh, switches = tp_mesh(), STRATEGIES[strategy]
    axis, seams = mesh.tp, choose_seams(mesh, switches)
    cut, cut_sequence = Cut(0, axis, axis.size), switches.sequence_parallel
    ids, labels = torch.tensor([[0, 4], [3, 3]]), torch.tensor([[4, -100], [1, 3]])

    def padded(w: Tensor) -> Tensor:
        return mine(F.pad(w, (0, 0, 0, cut.padded_piece(5) * axis.size - 5)), axis)

    def embedded(w: Tensor) -> Tensor:
        x = seams.leave(look_up(ids, padded(w), cut, 5), axis)
        return joined(x, axis) if cut_sequence else x

    def loss(x: Tensor, w: Tensor) -> Tensor:
        (logits,) = seams.columns(mine(x, axis) if cut_sequence else x, (SimpleNamespace(weight=padded(w), bias=None),), axis)
        return cross_entropy(logits, labels, cut, 5)

    x, w = local((2, 2, 3), 0), local((5, 3), 1)
    assert torch.equal(embedded(w), F.embedding(ids, w))
    want = F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss(x, w), want, rtol=1e-13, atol=1e-13)
    torch.manual_seed(0)
    assert gradcheck(embedded, (w,), fast_mode=True)
    assert gradcheck(loss, (x, w), fast_mode=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradcheck_of_vocab_regions(pool, strategy: str) -> None:
    pool(2).run(check_vocab_regions, strategy)


def check_attention(name: str, layout: str) -> None:
    """Whole q, k and v on every rank, of which each takes its tokens; the whole output counts once."""
    axis = tp_mesh().tp
    sequence = SequenceMap(axis, layout)

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ATTENTIONS[name](*(sequence.own(copy_in(x, axis)) for x in (q, k, v)), sequence=sequence)
        others = torch.zeros_like(out)
        return sum_out(sequence.join([out if rank == axis.rank else others for rank in range(axis.size)]), axis)

    torch.testing.assert_close(region(*attended()), dense_attention(*attended()), rtol=1e-13, atol=1e-13)
    torch.manual_seed(0)
    assert gradcheck(region, attended(), fast_mode=True)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradcheck_of_attention_over_two_ranks(pool, name: str, layout: str) -> None:
    pool(2).run(check_attention, name, layout)


def fails_when_spoilt(kind: str, strategy: str, spoilt: str) -> bool:
    functions = {"CopyIn": CopyIn, "RowSum": RowSum, "RowScatter": RowScatter, "HiddenReduce": HiddenReduce}
    function = {**functions, "RingAttention": ring.RingAttention}[kind]
    kept = function.backward
    wrong = {
        "no sum": lambda ctx, *dys: (dys[0], None),
        "doubled": lambda ctx, *dys: tuple(None if g is None else 2 * g for g in kept(ctx, *dys)),
    }
    function.backward = staticmethod(wrong[spoilt])
    try:
        if kind == "RingAttention":
            check_attention(kind, strategy)
        else:
            check_region(strategy)
    except GradcheckError:
        return True
    finally:
        function.backward = staticmethod(kept)
    return False


@pytest.mark.parametrize(
    ("kind", "strategy", "spoilt"),
    [
        ("CopyIn", "tp", "no sum"),
        ("RowSum", "tp", "doubled"),
        ("RowScatter", "sp", "doubled"),
        ("HiddenReduce", "tp-async", "doubled"),
        ("RingAttention", "zigzag", "doubled"),
    ],
)
def test_gradcheck_of_regions_can_fail(pool, kind: str, strategy: str, spoilt: str) -> None:
    assert pool(2).run(fails_when_spoilt, kind, strategy, spoilt) == [True, True]
