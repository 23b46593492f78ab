"""The ledger: what every collective and message sends, when, and during which action. Off, it costs nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minimind_tron.mesh import Axis


@dataclass
class Entry:
    """One collective or message of one rank: bytes are those a rank sends (in a ring), times are of ``time.perf_counter``.

    ``action`` is what the pipeline was doing, empty between actions.
    """

    axis: str
    kind: str
    sent_bytes: int
    backward: bool
    start_s: float
    end_s: float = 0.0
    action: str = ""


_ledger: list[Entry] | None = None
_action = ""
_backward = False


@contextmanager
def ledger() -> Iterator[list[Entry]]:
    """Record every collective of this process while the context is open.

    Raises: AssertionError when one is open already.
    """
    global _ledger
    assert _ledger is None, "a ledger is open already"
    entries: list[Entry] = []
    _ledger = entries
    try:
        yield entries
    finally:
        _ledger = None


@contextmanager
def booked_under(action: str, backward: bool) -> Iterator[None]:
    """Note in the ledger's entries what was being done; put off, a part of the backward runs outside of autograd's."""
    global _action, _backward
    _action, _backward = action, backward
    try:
        yield
    finally:
        _action, _backward = "", False


def book(axis: Axis, kind: str, sent_bytes: float, backward: bool | None = None) -> Entry | None:
    """Note a collective that begins, if a ledger is open; without ``backward`` that is read off autograd."""
    if _ledger is None:
        return None
    in_backward = (_backward or torch._C._current_graph_task_id() != -1) if backward is None else backward
    entry = Entry(axis.name, kind, int(sent_bytes), in_backward, time.perf_counter(), action=_action)
    _ledger.append(entry)
    return entry
