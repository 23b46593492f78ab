"""The pool gives results in rank order, names the rank that failed first, and is whole again after a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError

ROOT = Path(__file__).parents[1]


def rank_and_sum(offset: float, *, scale: float) -> tuple[int, torch.Tensor, int, int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    total = torch.tensor([scale * (rank + offset)])
    if dist.is_initialized():
        dist.all_reduce(total)
    return rank, total, os.getpid(), torch.get_num_threads()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    time.sleep(1000)


def unpicklable() -> object:
    return lambda: 0


def fail_alone() -> None:
    raise ValueError("no luck alone")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(pool, size):
    results = pool(size).run(rank_and_sum, 1.0, scale=2.0)
    assert [rank for rank, *_ in results] == list(range(size))
    assert all(total.item() == size * (size + 1) for _, total, *_ in results)
    assert len({pid for _, _, pid, _ in results}) == size
    assert size == 1 or {threads for *_, threads in results} == {1}


def test_processes_outlive_a_test(pool):
    first, second = (pool(2).run(rank_and_sum, 0.0, scale=1.0) for _ in range(2))
    assert [r[2] for r in first] == [r[2] for r in second]


def test_one_rank_has_no_process_group(pool):
    assert pool(1).run(dist.is_initialized) == [False]
    with pytest.raises(RankError, match=r"(?s)rank 0 of 1.*no luck alone"):
        pool(1).run(fail_alone)


def test_failures_name_the_rank_and_the_pool_recovers():
    """One pool of its own: its processes are killed on the way, which the shared ones should be spared."""
    pool = Pool(2)
    try:
        with pytest.raises(RankError, match=r"(?s)fail_on failed on rank 1 of 2:.*ValueError: no luck on 1"):
            pool.run(fail_on, 1)
        with pytest.raises(RankError, match=r"die_on failed on rank 0 of 2:\nthe process ended with exit code -9"):
            pool.run(die_on, 0)
        with pytest.raises(RankError, match=r"hang did not end within 0.5 s on rank 0, 1 of 2"):
            pool.run(hang, timeout_s=0.5)
        with pytest.raises(RankError, match=r"(?i)pickle"):
            pool.run(unpicklable)
        pids = [pid for *_, pid, _ in pool.run(rank_and_sum, 0.0, scale=1.0)]
    finally:
        pool.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_do_not_outlive_a_killed_test_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from tests.pool import pool\n"
        "from tests.test_pool import rank_and_sum\n"
        "if __name__ == '__main__':\n"
        "    print(*(r[2] for r in pool(2).run(rank_and_sum, 0.0, scale=1.0)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
