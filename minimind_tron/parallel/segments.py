"""Segments: the parts of a chunk that are taken forward and backward one by one, and what each keeps in between.

A chunk of the model is a row of segments: the embedding, every block, the final norm with what is made of it. The graph is cut
between them, so the backward of one can be run, its gradients be summed and its weights be freed before the one before it begins.
What a segment keeps of a microbatch from its forward to its backward is a *visit*; there are three kinds:

- ``Visit`` keeps the graph;
- ``VisitAgain`` (``--recompute block``) keeps the input and runs the forward again;
- ``VisitKept`` (``--recompute selective``) keeps the input and the result of every matmul with weights, or of the collective
  behind it; the second forward takes those from where they are kept and computes the rest: norms, rotations, attention, products.

The second forward runs the same code on the same numbers, so it gives the same bits. Whatever is random in it must be drawn from
what the microbatch is, not from a generator's state; see ``dropout.py``.

Cost: again, a forward more, with all it sends. Kept, attention's collectives (CP) once more, and under SP without its own
recomputation the gathers of the entries.
Source: Chen et al., arXiv 1604.06174; selective after Korthikanti et al., arXiv 2205.05198, section 5. There only the core of
attention is computed again; here the element-wise parts are, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from minimind_tron.layout import LaidOut

T = TypeVar("T")
# How a segment's weights make y of x; ``view`` is what the model knows of the microbatch.
Run = Callable[[Tensor | None, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a chunk, the weights it uses, and how it visits a microbatch when there will be a backward."""

    name: str
    weights: Sequence[LaidOut]
    run: Run
    visit: "type[AnyVisit]"


class AnyVisit(Protocol):
    """A segment's forward of one microbatch, as far as the backward needs it; x is None for the embedding."""

    segment: Segment

    def __init__(self, segment: Segment, x: Tensor | None, view: Any) -> None: ...

    def forward(self) -> Tensor:
        """The segment's output, which no graph holds."""
        ...

    def backward(self, dy: Tensor) -> Tensor | None:
        """Add to the gradients of the weights; returns that of the input, if there was one."""
        ...


def _entered(x: Tensor | None) -> Tensor | None:
    """The beginning of a graph."""
    return None if x is None else x.detach().requires_grad_()


class Visit:
    """Keeps the graph, entered at its edge: the output itself is kept by whoever needs it."""

    def __init__(self, segment: Segment, x: Tensor | None, view: Any) -> None:
        self.segment, self.x, self.view = segment, _entered(x), view

    def forward(self) -> Tensor:
        """The segment's output, which no graph holds."""
        y = self.segment.run(self.x, self.view)
        self.edge = get_gradient_edge(y)
        return y.detach()

    def backward(self, dy: Tensor) -> Tensor | None:
        """Add to the gradients of the weights; returns that of the input, if there was one."""
        torch.autograd.backward((self.edge,), (dy,))
        return None if self.x is None else self.x.grad


class VisitAgain:
    """Keeps the input only, and runs the forward again before the backward."""

    def __init__(self, segment: Segment, x: Tensor | None, view: Any) -> None:
        self.segment, self.x, self.view = segment, x, view

    @torch.no_grad()
    def forward(self) -> Tensor:
        """The segment's output, which no graph holds."""
        return self.segment.run(self.x, self.view)

    def again(self, x: Tensor | None) -> Tensor:
        """The segment's output, with its graph."""
        return self.segment.run(x, self.view)

    def backward(self, dy: Tensor) -> Tensor | None:
        """Add to the gradients of the weights; returns that of the input, if there was one."""
        x = _entered(self.x)
        torch.autograd.backward((self.again(x),), (dy,))
        return None if x is None else x.grad


class VisitKept(VisitAgain):
    """Keeps the input and what ``kept`` is asked for."""

    def forward(self) -> Tensor:
        """The segment's output, which no graph holds."""
        with _keeping() as self.results:
            return super().forward()

    def again(self, x: Tensor | None) -> Tensor:
        """The segment's output, with its graph."""
        with _replaying(self.results):
            return super().again(x)


# The same calls in the same order: the first forward fills the list, the second one empties it.
_results: list[Any] | None = None
_fills = False


@contextmanager
def _keeping() -> Iterator[list[Any]]:
    global _results, _fills
    assert _results is None, "results are being kept already"
    results: list[Any] = []
    _results, _fills = results, True
    try:
        yield results
    finally:
        _results, _fills = None, False


@contextmanager
def _replaying(results: list[Any]) -> Iterator[None]:
    global _results
    assert _results is None, "results are being replayed already"
    _results = results
    try:
        yield
        assert not results, f"the second forward left {len(results)} results of the first one"
    finally:
        _results = None


def kept(compute: Callable[[], T]) -> T:
    """What ``compute`` gives, or gave when the segment was run for the first time."""
    if _results is None:
        return compute()
    if not _fills:
        assert _results, "the second forward asks for more results than the first one kept"
        return _results.pop(0)
    result = compute()
    _results.append(result)
    return result
