"""Worker processes that live for the whole test run: starting torch costs seconds, a test should cost milliseconds.

``pool(4).run(function, *args)`` calls a module-level function of ``tests`` on four ranks with an initialised gloo group and returns
what it returned, in rank order. One rank has no process group and runs in the test's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE_S = 1.0  # how long the others are waited for once a rank has failed, since a lost peer is often noticed before the loss


class RankError(AssertionError):
    """A function failed on a rank, or a rank did not answer in time."""


class Pool:
    """``size`` ranks that wait for functions to run; the processes are started at first use, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on every rank and returns the results in rank order.

        Raises: RankError with the traceback of the rank that failed first, or the ranks still running after ``timeout_s``.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        if self.size == 1:
            try:
                return [function(*args, **kwargs)]
            except Exception as error:
                raise RankError(f"{name} failed on rank 0 of 1:\n{traceback.format_exc()}") from error
        # Plain pickle: the pickler of multiprocessing would send tensors as shared memory, whose owner may be killed by then.
        call = pickle.dumps((function, args, kwargs))
        if not self._workers:
            self._start()
        try:
            for _, connection in self._workers:
                connection.send_bytes(call)
            return self._collect(name, timeout_s)
        except BaseException:
            # The other ranks may sit in a collective that will never end, a pipe may hold half an answer.
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the processes; the next ``run`` starts new ones."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="minimind_tron_pool_")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, name: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        end = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed_at, answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join()
                    # It died without a word, so before any rank that complains about a lost peer.
                    failed_at, answer = -1.0, f"the process ended with exit code {process.exitcode}\n"
                if failed_at is None:
                    results[rank] = answer
                else:
                    failures.append((failed_at, rank, answer))
                    end = min(end, time.monotonic() + _GRACE_S)
        if failures:
            _, rank, text = min(failures)
            raise RankError(f"{name} failed on rank {rank} of {self.size}:\n{text}")
        if waiting:
            ranks = ", ".join(map(str, sorted(waiting.values())))
            raise RankError(f"{name} did not end within {timeout_s:g} s on rank {ranks} of {self.size}")
        return [results[rank] for rank in range(self.size)]


_pools: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The pool of this size; one per test run."""
    return _pools.setdefault(world_size, Pool(world_size))


def stop_all() -> None:
    """Ends every worker process; called when the test run ends."""
    for each in _pools.values():
        each.stop()
    _pools.clear()


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; pytest hears it and stops the pool
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            break
        try:
            # Unpickling imports the test's module: a failure there is the test's failure, and so is a result that does not pickle.
            function, args, kwargs = pickle.loads(call)
            answer = pickle.dumps((None, function(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((time.time(), traceback.format_exc()))
        connection.send_bytes(answer)
    os._exit(0)


def _follow_parent(parent: int) -> None:
    # A test run that was killed cannot stop its workers, and a worker in a collective does not read its pipe.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
