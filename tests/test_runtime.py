"""Starting, ending and failing: what a launcher shows, what it returns, and that nothing stays behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimind_tron import place, runtime
from minimind_tron.commands.env import environment
from minimind_tron.errors import TronError
from minimind_tron.place import Place, find_place
from minimind_tron.runtime import launch, launched, launched_world_size, say, session

ROOT = Path(__file__).parents[1]

# A main program as cli.main is one. What it does beside: collectives nobody waits for, and references to groups that outlive them.
WORKER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from minimind_tron.errors import TronError
from minimind_tron.runtime import leave, report, say, session

mode, folder = sys.argv[1:3]
kept = []

def main():
    with session(timeout_s=60) as world:
        assert world.size > 1 and world.backend == "gloo" and world.device.type == "cpu", world
        kept.append((dist.new_group(list(range(world.size))), dist.group.WORLD))
        open(os.path.join(folder, f"pid{os.getpid()}"), "w").close()
        if mode == "crash" and world.rank == 1:
            raise ValueError("boom on one rank")
        if mode == "mistake":  # on both: one may be gone while the other still connects, which gloo logs from C++
            raise TronError(f"x={sys.argv[3]} is odd", "use --x 2")
        if mode == "killed" and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang" and world.rank == 1:
            time.sleep(1000)
        for _ in range(8):
            dist.all_reduce(torch.ones(200000), async_op=True)
        total = torch.tensor([world.rank + 1.0])
        dist.all_reduce(total, group=kept[0][0])
        say("sum", total.item(), "of", world.size, "ranks,", torch.get_num_threads(), "threads")
    return 1 if mode == "verdict" else 0

try:
    code = main()
    if mode == "twice":
        code = main()
except BaseException as error:
    code = report(error)
leave(code)
"""
LAUNCHER = "import sys; from minimind_tron.runtime import launch_command; sys.exit(launch_command(sys.argv[2:], int(sys.argv[1])))"


@pytest.fixture
def bare(monkeypatch):
    """An environment no launcher has touched."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)
        if name.startswith(("SLURM_", "MINIMIND_TRON_")):
            monkeypatch.delenv(name)
    return monkeypatch


def start(tmp_path: Path, mode: str, size: int = 2, *more: str) -> subprocess.Popen[str]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(size), sys.executable, str(worker), mode, str(tmp_path), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def pids(tmp_path: Path) -> list[int]:
    return [int(path.name[3:]) for path in tmp_path.glob("pid*")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that ended stays a zombie where nobody (PID 1 of a container) collects it.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def assert_all_gone(tmp_path: Path, count: int) -> None:
    assert len(pids(tmp_path)) == count
    end = time.monotonic() + 10
    while any(map(alive, pids(tmp_path))):
        assert time.monotonic() < end, "processes stayed behind"
        time.sleep(0.1)


def wait_for_workers(tmp_path: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(pids(tmp_path)) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)  # until rank 0 sits in its collective


def test_success_says_it_once_and_shares_the_cores(bare, tmp_path):
    bare.setenv("LOGLEVEL", "INFO")  # the agent's own log stays silent even so
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else None
    code, out, err = finish(start(tmp_path, "twice"))  # a session after a session meets nothing of the first
    assert (code, err) == (0, "")
    assert out.count("sum 3.0 of 2 ranks,") == out.count("\n") == 2
    assert threads is None or f"{threads} threads" in out
    assert_all_gone(tmp_path, 2)


def test_a_verdict_of_all_ranks_is_the_exit_code(bare, tmp_path):
    code, out, err = finish(start(tmp_path, "verdict"))
    assert (code, out.count("sum 3.0"), err) == (1, 1, "")


def test_a_mistake_is_one_line_and_arguments_arrive_as_given(bare, tmp_path):
    assert finish(start(tmp_path, "mistake", 2, "$$${local_rank}")) == (2, "", "x=$$${local_rank} is odd; use --x 2\n")


def test_one_rank_that_raises_ends_the_job(bare, tmp_path):
    began = time.monotonic()
    code, _, err = finish(start(tmp_path, "crash"))
    assert time.monotonic() - began < 30
    assert code == 1
    assert err.startswith("rank 1 failed:\nTraceback")
    assert err.endswith("ValueError: boom on one rank\n")
    assert err.count("Traceback") == 1
    assert_all_gone(tmp_path, 2)


def test_a_killed_rank_is_named_with_its_signal(bare, tmp_path):
    code, _, err = finish(start(tmp_path, "killed"))
    assert code == 1
    assert err.startswith("rank 1 was ended by SIGKILL")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_to_the_launcher_leave_nothing_behind(bare, tmp_path, number, expected):
    process = start(tmp_path, "hang")
    wait_for_workers(tmp_path, 2)
    process.send_signal(number)
    code, _, err = finish(process)
    said = "" if number == signal.SIGKILL else f"stopped by {number.name}\n"
    assert (code, err) == (expected, said)
    assert_all_gone(tmp_path, 2)


def test_two_tasks_of_srun_find_each_other(bare, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "a-host-that-does-not-resolve[07-09]",
        "PYTHONPATH": str(ROOT),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), "twice", str(tmp_path)],
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (finish(task) for task in tasks)
    assert first[0] == second[0] == 0, (first, second)
    assert first[1].count("sum 3.0 of 2 ranks") == 2
    assert second[1] == ""


def test_places_of_srun(bare):
    for name, value in {
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
        "SLURM_NODEID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "16001",
        "SLURM_STEP_ID": "1",
        "SLURM_JOB_NODELIST": "gpu[03-05,07],login",
    }.items():
        bare.setenv(name, value)
    assert find_place(os.environ) == Place(6, 8, 0, 2, "tcp://gpu03:16010")
    assert launched_world_size() == 8
    bare.setenv("MASTER_ADDR", "10.0.0.1")
    bare.setenv("MASTER_PORT", "4000")
    assert find_place(os.environ) == Place(6, 8, 0, 2, "tcp://10.0.0.1:4000")
    bare.setenv("SLURM_LOCALID", "2")
    with pytest.raises(TronError, match="local rank 2 of 2"):
        launched()


def test_a_batch_script_of_slurm_is_no_launcher(bare):
    bare.setenv("SLURM_PROCID", "0")
    bare.setenv("SLURM_NTASKS", "8")
    assert not launched()


def test_torchrun_goes_before_slurm(bare):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        bare.setenv(name, value)
    bare.setenv("SLURM_PROCID", "0")
    bare.setenv("SLURM_STEP_NUM_TASKS", "9")
    assert find_place(os.environ) == Place(1, 4, 1, 2, "env://")
    bare.setenv("RANK", "one")
    with pytest.raises(TronError, match="RANK='one' is not a number; unset RANK"):
        launched()
    bare.setenv("RANK", "4")
    with pytest.raises(TronError, match="rank 4 of 4"):
        launched()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,07]", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("a1,b2", "a1"),
        ("rack[1-2]n[3,4]-ib,x", "rack1n3-ib"),
        ("node-1.cluster", "node-1.cluster"),
    ],
)
def test_first_host(nodes, first):
    assert place._first_host(nodes) == first


def test_no_host_at_all():
    with pytest.raises(TronError, match="MASTER_ADDR"):
        place._first_host("")


def test_tasks_per_node():
    assert place._tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert place._tasks_per_node("4") == [4]


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 1, 2), (3, 2, 1), (7, 2, 3), (2, 8, 1), (64, 8, 8)])
def test_a_rank_gets_its_share_of_the_cores(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(runtime, "_cores", lambda: cores)
    assert runtime._threads(ranks) == threads


def test_one_rank_needs_no_process_group(bare, capsys):
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    try:
        with session(device="cpu") as world:
            assert (world.rank, world.size, world.local_rank, world.local_size, world.backend) == (0, 1, 0, 1, None)
            assert world.device == torch.device("cpu")
            assert torch.get_num_threads() == runtime._cores()
            assert not dist.is_initialized()
            say("inside")
    finally:
        torch.set_num_threads(threads)
    say("outside")
    assert capsys.readouterr().out == "inside\noutside\n"


def test_only_rank_0_speaks_before_the_session(bare, capsys):
    bare.setenv("RANK", "1")
    bare.setenv("WORLD_SIZE", "2")
    say("nothing")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_device_that_is_not_there_is_a_mistake(bare, monkeypatch, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TronError, match=f"device='?{device}'?.*--device cpu|--device auto"), session(device=device):
        pass
    with pytest.raises(TronError, match=device):
        launch(["train"], 2, device=device)


def test_more_ranks_than_a_host_runs_are_refused_before_any_is_started(bare) -> None:
    with pytest.raises(TronError) as error:
        launch(["validate"], runtime.MOST_RANKS + 1, device="cpu")
    assert str(error.value).startswith(
        "513 ranks were asked for, and at most 512 are started on one host; lower the size of an axis"
    )


def test_windows_is_pointed_to_wsl(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(TronError, match="WSL"), session():
        pass
    with pytest.raises(TronError, match="WSL"):
        launch(["train"], 2, device="cpu")


def test_the_first_error_is_told(capsys):
    records = [
        {"rank": 0, "code": 1, "text": "lost a peer", "time_ns": 2},
        {"rank": 1, "code": 1, "text": "the cause", "time_ns": 1},
    ]
    assert runtime._tell(records, {0: 1, 1: 1}) == 1
    assert capsys.readouterr().err == "rank 1 failed:\nthe cause\n"
    assert runtime._tell(records, {0: 1, 1: 1, 2: -signal.SIGSEGV}) == 1
    assert capsys.readouterr().err == "rank 2 was ended by SIGSEGV\n"
    assert runtime._tell(records, {0: -signal.SIGABRT, 1: -signal.SIGTERM}) == 1
    assert capsys.readouterr().err == "rank 1 failed:\nthe cause\n"
    assert runtime._tell([], {0: -signal.SIGTERM, 1: 2}) == 2
    assert runtime._tell([], {0: -signal.SIGTERM, 1: -signal.SIGTERM}) == 1
    assert capsys.readouterr().err == "rank 0 was ended by SIGTERM\n"


def test_a_rank_ended_from_outside_is_named_not_the_peers_that_lost_it(capsys):
    lost = {"rank": 0, "code": 1, "text": "RuntimeError: Connection reset by peer", "time_ns": 5}
    assert runtime._tell([lost], {0: 1, 1: -signal.SIGTERM}) == 1
    assert capsys.readouterr().err == "rank 1 was ended by SIGTERM\n"
    first = {"rank": 1, "code": 1, "text": "ValueError: mine", "time_ns": 9}
    assert runtime._tell([lost, first], {0: 1, 1: 1, 2: -signal.SIGTERM}) == 1
    assert "SIGTERM" not in capsys.readouterr().err


def test_memory_that_is_not_there_is_a_mistake_in_one_line():
    code, text = runtime._explain(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 64 bytes"))
    assert (code, text.count("\n")) == (2, 0)
    assert "--micro-batch-size" in text
    assert runtime._explain(RuntimeError("shapes differ"))[0] == 1


def test_a_reader_that_goes_away_does_not_change_the_exit_code():
    script = "from minimind_tron.runtime import say\nfor _ in range(20000): say('x' * 50)\nimport sys; sys.exit(7)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 7


def test_the_environment_report_names_what_matters(bare):
    report = dict(environment())
    assert report["launcher"] == "none"
    assert "gloo" in report["backends"]
    assert {"minimind-tron", "python", "torch", "transformers", "system", "cores", "GPUs"} <= report.keys()


def test_importing_the_runtime_does_not_import_torch():
    probe = "import minimind_tron.runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0


def test_only_the_runtime_reads_the_environment():
    sources = (ROOT / "minimind_tron").rglob("*.py")
    readers = {path.name for path in sources if re.search(r"\benviron\b|\bgetenv\b", path.read_text())}
    assert readers == {"runtime.py"}
