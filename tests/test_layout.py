"""Cut and join are each other's inverse, padding is zero, and the weights at step 0 do not know the mesh."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimind_tron.collectives import gather_whole
from minimind_tron.layout import Cut, Layout, Storage, draw, fill_from, layout_of, live, parameter
from minimind_tron.mesh import Axis
from minimind_tron.model import Model, initialise
from tests.meshes import STRATEGIES, lonely, tiny, tp_mesh

CPU64 = Storage(torch.float64, torch.device("cpu"))


def cut_up(whole: Tensor, dim: int, parts: int, copies: int) -> list[tuple[Layout, Tensor]]:
    """Every rank's layout and local tensor."""
    pieces = []
    for rank in range(parts * copies):
        layout = Layout(tuple(whole.shape), cut=Cut(dim, lonely(parts * copies, rank), parts))
        local = torch.full(layout.local_shape, torch.nan)
        fill_from(local, layout, whole[layout.region])
        pieces.append((layout, local))
    return pieces


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.sampled_from([0, 1]))
def test_join_inverts_cut(size: int, parts: int, copies: int, dim: int) -> None:
    whole = torch.arange(1.0, 2 * size + 1).view((size, 2) if dim == 0 else (2, size))
    pieces = cut_up(whole, dim, parts, copies)
    locals_ = [local for _, local in pieces]
    assert len({local.shape for local in locals_}) == 1
    for rank, (layout, local) in enumerate(pieces):
        assert torch.equal(layout.join(locals_), whole)
        assert torch.equal(local, locals_[rank // copies * copies])
        assert torch.equal(layout.unpadded(local), whole[layout.region])
    # Each element is there once among the pieces, and what is padded is zero.
    assert sum(local.sum() for local in locals_) == copies * whole.sum()
    assert sum(int((local == 0).sum()) for local in locals_) == sum(local.numel() for local in locals_) - copies * whole.numel()


@pytest.mark.parametrize(
    ("whole", "parts", "rows"),
    [
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (3, 4, [(0, 1), (1, 2), (2, 3), (3, 3)]),
        (1, 4, [(0, 1), (1, 1), (1, 1), (1, 1)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_rows_of_each_piece(whole: int, parts: int, rows: list[tuple[int, int]]) -> None:
    cuts = [Cut(0, lonely(parts, rank), parts) for rank in range(parts)]
    assert [cut.rows(whole, cut.piece) for cut in cuts] == rows
    assert [Layout((whole, 3), cut=cut).region for cut in cuts] == [(slice(*row), slice(0, 3)) for row in rows]


def test_an_empty_piece_is_all_padding() -> None:
    layout, local = cut_up(torch.ones(3, 2), 0, 4, 1)[3]
    assert layout.local_shape == local.shape == (1, 2)
    assert layout.unpadded(local).shape == (0, 2)
    assert local.eq(0).all()


def test_unpadded_is_a_view() -> None:
    layout, local = cut_up(torch.ones(5), 0, 2, 1)[1]
    layout.unpadded(local).fill_(7)
    assert local.tolist() == [7, 7, 0]


def test_without_a_cut_the_tensor_is_whole() -> None:
    layout, whole = Layout((2, 3)), torch.ones(2, 3)
    assert layout.local_shape == (2, 3)
    assert layout.region == (slice(0, 2), slice(0, 3))
    assert layout.join([whole]) is whole


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (2, 3), (4, 2), (3, 8)])
def test_every_real_element_is_kept_by_one_rank(parts: int, ranks: int, dim: int) -> None:
    """Cut over tp with padding, and then over dp without: all that is kept, put together, is the whole tensor."""
    whole = torch.arange(13 * 5, dtype=torch.float64).view(13, 5) + 1
    kept_rows, found = 0, []
    for piece in range(parts):
        for rank in range(ranks):
            cut = Cut(dim, Axis("tp", parts, piece, tuple(range(parts))), parts)
            shard = Cut(0, Axis("dp", ranks, rank, tuple(range(ranks))), ranks)
            layout = Layout((13, 5), cut=cut, shard=shard)
            local = torch.full(layout.local_shape, -1.0, dtype=torch.float64)
            fill_from(local, Layout((13, 5), cut=cut), whole[layout.region])
            kept = layout.kept(local)
            assert kept.shape[0] == layout.rows[1] - layout.rows[0]
            assert kept.numel() == 0 or kept.untyped_storage().data_ptr() == local.untyped_storage().data_ptr(), "a view"
            kept_rows += kept.shape[0]
            found.append(layout.unpadded(kept).reshape(-1))
    assert torch.equal(torch.cat(found).sort().values, whole.view(-1))
    assert kept_rows == layout.local_shape[0] * parts, "padded rows are kept once, too"


def test_a_parameter_carries_its_layout() -> None:
    layout = Layout((5, 2), cut=Cut(0, lonely(4, 1), 4))
    weight = parameter(layout, CPU64)
    assert layout_of(weight) == layout
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((2, 2), torch.float64, True)


def test_where_the_sequence_is_cut_every_gradient_is_a_part() -> None:
    tp, cp = lonely(4, 1), Axis("cp", 2, 0, (0, 1))
    storage = Storage(torch.float64, torch.device("cpu"), (cp,))
    assert layout_of(parameter(Layout((5, 2), partial=(tp,)), storage)) == Layout((5, 2), partial=(tp, cp))
    assert layout_of(parameter(Layout((5, 2)), storage)) == Layout((5, 2), partial=(cp,))


def test_live_axes_have_more_than_one_rank() -> None:
    two = lonely(2, 0)
    assert live(Axis("dp"), two, Axis("cp")) == (two,)


def test_draw_depends_on_name_and_seed_only() -> None:
    whole = draw("a", Layout((6, 4)), 1)
    torch.manual_seed(0)
    for axis in (lonely(2, 1), lonely(4, 3)):
        assert torch.equal(draw("a", Layout((6, 4), cut=Cut(0, axis, 2), partial=(axis,)), 1), whole)
    others = [draw("b", Layout((6, 4)), 1), draw("a", Layout((6, 4)), 2), draw("", Layout((6, 4)), 0)]
    assert all(not torch.equal(other, whole) for other in others)
    assert whole.dtype == torch.float32


def test_draw_fills() -> None:
    normal = draw("a", Layout((400, 400)), 0)
    assert normal.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(normal.mean().item()) < 3e-4
    for fill, centre in (("ones", 1.0), ("zeros", 0.0)):
        layout = Layout((10000,), fill)
        assert torch.equal(draw("a", layout, 0), torch.full((10000,), centre))
        spread = draw("a", layout, 0, spread=0.5)
        assert spread.std().item() == pytest.approx(0.5, rel=0.05)
        assert spread.mean().item() == pytest.approx(centre, abs=0.03)


def whole_weights(strategy: str, vocab_parallel: bool, spread: float) -> dict[str, Tensor]:
    switches = STRATEGIES[strategy].model_copy(update={"vocab_parallel": vocab_parallel})
    config = tiny(attention_bias=True, tie_word_embeddings=False)
    model = Model(config, tp_mesh(), switches)
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    initialise(model, 3, spread)
    return {name: gather_whole(weight.detach(), layout_of(weight)) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("strategy", "vocab_parallel"), [("tp", False), ("sp", True)])
def test_the_whole_weights_are_bit_equal_on_every_mesh(pool, size: int, strategy: str, vocab_parallel: bool) -> None:
    (dense,) = pool(1).run(whole_weights, "tp", False, 0.1)
    assert len({tuple(w.shape) for w in dense.values()}) > 5
    for weights in pool(size).run(whole_weights, strategy, vocab_parallel, 0.1):
        assert weights.keys() == dense.keys()
        assert [name for name in dense if not torch.equal(weights[name], dense[name])] == []


def test_initialise_spreads_ones_and_zeros_only() -> None:
    flat, spread = whole_weights("tp", False, 0.0), whole_weights("tp", False, 0.1)
    changed = {name for name in flat if not torch.equal(flat[name], spread[name])}
    assert changed == {name for name in flat if "norm" in name or "bias" in name}
    assert all(flat[name].eq(1.0 if "norm" in name else 0.0).all() for name in changed)
