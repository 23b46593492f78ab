"""Who this process is, what it runs on, and how it starts and ends: the only reader of ``os.environ``.

``session`` hides how a process was started: by plain ``python`` (one rank, no process group), by a launcher that was there first
(``torchrun``, or ``srun`` of SLURM), or by ``launch`` below, which the command line calls when a mesh needs more than one rank.
torch is imported inside the functions that need it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from minimind_tron.errors import TronError
from minimind_tron.place import Place, find_place

if TYPE_CHECKING:
    import torch

# "<pid of the launcher>:<folder for errors>": set by launch for its workers, so that an error is told once, by the launcher.
_LAUNCHER = "MINIMIND_TRON_LAUNCHER"
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_OUT_OF_MEMORY = ("can't allocate memory", "std::bad_alloc", "CUDA out of memory")
_STOP_S = 10  # between SIGTERM and SIGKILL
# More is a slip of the hand: every rank is a process with a torch of its own.
MOST_RANKS = 512
_session: World | None = None
_sessions = 0


@dataclass(frozen=True)
class World:
    """Who this process is and what it runs on; ``backend`` is None where there is one rank and so no process group.

    ``timeout_s`` is how long a rank may wait for another.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    timeout_s: float | None = None


def launched() -> bool:
    """Whether a launcher (``torchrun``, ``srun`` or ``launch``) started this process as one rank of several."""
    return launched_world_size() is not None


def launched_world_size() -> int | None:
    """The number of ranks the launcher started, or None without a launcher."""
    place = find_place(os.environ)
    return place.size if place else None


def launch(arguments: list[str], world_size: int, *, device: str) -> int:
    """Runs ``minimind-tron *arguments`` as ``world_size`` ranks on this host and returns the exit code for the command line.

    Returns: 0; the workers' own code where they agreed on one (1: validate said FAIL) or failed with one (2: a user's mistake);
        1 for crashes and kills; 130 and 143 after Ctrl-C and SIGTERM. A failure is shown once, as the error that came first.
    Raises: TronError for a device this host does not have, for more ranks than any host runs, and on native Windows.
    """
    _refuse_windows()
    if world_size > MOST_RANKS:
        raise TronError(
            f"{world_size} ranks were asked for, and at most {MOST_RANKS} are started on one host",
            "lower the size of an axis, or start the ranks with torchrun on several hosts",
        )
    gpus = _accelerator(device)
    return launch_command([sys.executable, "-m", "minimind_tron", *arguments], world_size, gpus=gpus)


def launch_command(command: list[str], world_size: int, *, gpus: int = 0) -> int:
    """Runs any command as ``world_size`` ranks on this host; see ``launch``.

    Source: torch.distributed.launcher.api, with a c10d rendezvous on a free port of the loopback address, as a laptop's hostname
        need not resolve. Its multi-line report is replaced by the one error that matters.
    """
    handlers = {}
    environment = dict(os.environ)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    muted = logging.root.manager.disable
    try:
        with tempfile.TemporaryDirectory(prefix="minimind_tron_") as folder:
            errors = Path(folder, "errors")
            errors.mkdir()
            os.environ[_LAUNCHER] = f"{os.getpid()}:{errors}"
            os.environ.setdefault("OMP_NUM_THREADS", str(_threads(world_size)))
            if loopback:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            if gpus == 0:
                # Gloo logs each lost peer, and raises it too: behind the first error that is noise. The watchdog of nccl only logs.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            logging.disable(logging.CRITICAL)
            return _run_agent(command, world_size, errors)
    except _Stopped as stopped:
        print(f"stopped by {signal.Signals(stopped.number).name}", file=sys.stderr, flush=True)
        return 128 + stopped.number
    finally:
        logging.disable(muted)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def session(*, device: str = "auto", timeout_s: float = 600.0) -> Iterator[World]:
    """Makes this process one rank of the run: its device, its share of the cores and, with more than one rank, the process group.

    With a GPU for each rank the backend is nccl; ranks that outnumber the GPUs share them through gloo, and a line says so.
    On leaving, all ranks meet in a barrier and take the groups down. After an exception nobody waits for anybody: the error is
    recorded for the launcher, and the process should end through ``leave``.

    Raises: TronError for a device this host does not have, launcher variables that make no sense, and on native Windows.
    """
    global _session
    _refuse_windows()
    place = find_place(os.environ) or Place(rank=0, size=1, local_rank=0, local_size=1, url="")
    try:
        _follow_launcher()
        _session = _join(place, device, timeout_s)
        yield _session
        _part(_session)
    except BaseException as error:
        _record(error)
        raise
    finally:
        _session = None


def say(*args: object) -> None:
    """Prints on rank 0 only; a process that no launcher started is rank 0."""
    me = _session or find_place(os.environ)
    if me is None or me.rank == 0:
        try:
            print(*args, flush=True)
        except BrokenPipeError:
            # The reader (head, a pager) has gone. The run goes on, and so does its exit code; what is left to say goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise TronError(f"standard output cannot be written ({error.strerror})", "make room, or redirect it") from None


@contextmanager
def all_cores() -> Iterator[None]:
    """Lets this rank compute on every core of the host while the other ranks wait for it."""
    import torch

    share = torch.get_num_threads()
    torch.set_num_threads(_cores())
    try:
        yield
    finally:
        torch.set_num_threads(share)


def report(error: BaseException) -> int:
    """Shows an error where it is shown once and returns the exit code it stands for: 2 for a TronError, 130 for Ctrl-C, else 1.

    Under ``launch`` it is recorded, and the launcher prints the first one. Elsewhere it goes to stderr: a TronError as one line,
    anything else with its traceback, behind the rank where there are several.
    """
    code, text = _explain(error)
    if not _record(error):
        place = find_place(os.environ)
        print(f"rank {place.rank}: {text}" if place else text, file=sys.stderr, flush=True)
    return code


def leave(code: int) -> NoReturn:
    """Ends this process with ``code``; the last call of a main program that may be one of several ranks.

    A code other than 0 without a recorded error is a verdict (validate said FAIL), not a failure: it reaches the launcher as a
    note beside exit code 0, since a failing rank would have the launcher stop ranks that are still printing.
    """
    if not launched():
        sys.exit(code)
    path = _record_path()
    if path and code and not path.exists():
        _write(path, code, "")
        code = 0
    # A gloo thread drops its reference to a tensor after the collective it served is over. Where the tensor has a Python object
    # that takes the GIL, and a thread that asks for the GIL of a finalising interpreter is ended by pthread_exit inside a C++
    # destructor: std::terminate, SIGABRT, "terminate called without an active exception". destroy_process_group joins these
    # threads only if nobody else (a Mesh, say) still refers to the group. So the interpreter is never finalised here.
    with suppress(Exception):
        atexit._run_exitfuncs()  # writers of logs flush there
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def launcher_name() -> str:
    """What started this process: torchrun, srun or none."""
    return "none" if not launched() else "torchrun" if "RANK" in os.environ else "srun"


def describe_threads() -> list[tuple[str, str]]:
    """Cores this process may use, and the number of threads the user set."""
    return [("cores", str(_cores())), ("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set"))]


class _Stopped(BaseException):
    """Ctrl-C or a termination signal reached the launcher; not an Exception, so that the agent's own handlers let it pass."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _run_agent(command: list[str], world_size: int, errors: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_STOP_S,
        signals_to_handle="SIGHUP",  # the others are handled by _stop
        logs_specs=DefaultLogsSpecs(log_dir=str(errors.parent)),
    )
    try:
        # The agent expands ${local_rank} in arguments; a dollar sign of the user's is to arrive as it is.
        elastic_launch(config, command[0])(*(argument.replace("$", "$$") for argument in command[1:]))
    except SignalException as hung_up:
        return 128 + hung_up.sigval
    except ChildFailedError as failed:
        return _tell(_records(errors), {rank: failure.exitcode for rank, failure in failed.failures.items()})
    return max((record["code"] for record in _records(errors) if not record["text"]), default=0)


def _tell(records: list[dict[str, Any]], exit_codes: dict[int, int]) -> int:
    """Prints the error that came first and returns the exit code that stands for it."""
    # SIGTERM is how the agent ends the ranks that are left, and SIGABRT how a rank ends that lost a peer. A rank ended by any
    # other signal was the first to go: the errors of the rest only say that it is gone.
    signals: dict[int, signal.Signals] = {rank: signal.Signals(-code) for rank, code in exit_codes.items() if code < 0}
    killed: dict[int, signal.Signals] = {
        rank: number for rank, number in signals.items() if number not in (signal.SIGTERM, signal.SIGABRT)
    }
    failures = [record for record in records if record["text"]]
    # A rank that was ended by SIGTERM from outside leaves no error but those of its peers that lost it.
    if signals and failures and all(any(loss in record["text"] for loss in _LOST_PEER) for record in failures):
        killed, failures = killed or dict(signals), []
    if not killed and failures:
        first = min(failures, key=lambda record: record["time_ns"])
        where = "" if first["code"] == 2 else f"rank {first['rank']} failed:\n"
        print(where + first["text"].rstrip(), file=sys.stderr, flush=True)
        return first["code"]
    codes = [code for code in exit_codes.values() if code > 0]
    if killed or not codes:
        hint = " (SIGKILL is what the system sends when memory runs out)"
        rank, number = min((killed or signals).items())
        print(f"rank {rank} was ended by {number.name}{hint * (number == signal.SIGKILL)}", file=sys.stderr, flush=True)
        return 1
    return codes[0]


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, TronError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return 2, f"out of memory ({str(error).splitlines()[0][:160]}); use a smaller model, --seq-len or --micro-batch-size"
    return 1, "".join(traceback.format_exception(error))


def _record_path() -> Path | None:
    launcher = os.environ.get(_LAUNCHER)
    return Path(launcher.partition(":")[2], os.environ.get("RANK", "0")) if launcher else None


def _record(error: BaseException) -> bool:
    """Keeps this rank's first error for the launcher; False where no launcher of ours listens."""
    path = _record_path()
    if path and not path.exists() and not isinstance(error, SystemExit | GeneratorExit):
        _write(path, *_explain(error))
    return path is not None


def _write(path: Path, code: int, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"rank": int(path.name), "code": code, "text": text, "time_ns": time.time_ns()}))
    draft.replace(path)  # the launcher may end this process at any moment; it never reads half a file


def _records(errors: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(errors.iterdir()) if path.suffix != ".draft"]


def _follow_launcher() -> None:
    """Ends this worker when its launcher is gone, even by SIGKILL; a thread, since prctl(PR_SET_PDEATHSIG) is Linux only."""
    launcher, name = os.environ.get(_LAUNCHER), "minimind_tron launcher watch"
    if launcher is None or any(thread.name == name for thread in threading.enumerate()):
        return
    pid = int(launcher.partition(":")[0])

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name=name, daemon=True).start()


def _join(place: Place, device: str, timeout_s: float) -> World:
    global _sessions
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_threads(place.local_size))
    gpus = _accelerator(device)
    here = torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(here)
    ranks = (place.rank, place.size, place.local_rank, place.local_size)
    if place.size == 1:
        return World(*ranks, here, None)
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous(place.url, place.rank, place.size, timeout=timeout))
    # The agent's store outlives a session; without a prefix of its own a second session would meet the first one's addresses.
    _sessions += 1
    store = dist.PrefixStore(f"minimind_tron/{_sessions}", store)
    store.set_timeout(timeout)
    backend, distinct = "gloo", 0
    if gpus:
        # Which ranks share a GPU cannot be counted locally: SLURM may show every rank one GPU, another one each time.
        store.set(f"gpu/{place.rank}", f"{socket.gethostname()} {torch.cuda.get_device_properties(here).uuid}")
        distinct = len({store.get(f"gpu/{rank}") for rank in range(place.size)})
        backend = "nccl" if distinct == place.size and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    if gpus and backend == "gloo" and place.rank == 0:
        print(f"{place.size} ranks share {distinct} GPU{'s' * (distinct > 1)}: communication through gloo", flush=True)
    return World(*ranks, here, backend, timeout_s)


def _part(world: World) -> None:
    import torch.distributed as dist

    if world.size > 1 and dist.is_initialized():
        # Nobody takes a connection down that another rank still reads from; then all groups go, the default one last.
        dist.barrier(device_ids=[world.device.index] if world.backend == "nccl" else None)
        dist.destroy_process_group()


def _accelerator(device: str) -> int:
    """How many GPUs ``device`` means here; 0 for the CPU."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise TronError(f"device={device!r} is not auto, cpu or cuda", "use --device auto, cpu or cuda")
    gpus = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise TronError(f"device=cuda, but {why}", "use --device cpu, or install a CUDA build of torch on a host with a GPU")
    return gpus


def _cores() -> int:
    # What this process may run on, where the system can say so: containers and SLURM give a process part of the host.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(local_size: int) -> int:
    return max(1, _cores() // local_size)


def _refuse_windows() -> None:
    if sys.platform == "win32":
        raise TronError(
            "minimind-tron does not run natively on Windows", "use WSL 2: https://learn.microsoft.com/windows/wsl/install"
        )
