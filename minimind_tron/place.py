"""Which rank a launcher made of this process: the environment variables of torchrun and SLURM, as a pure function."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from minimind_tron.errors import TronError


@dataclass(frozen=True)
class Place:
    """A rank among all, a rank among those of this host, and where ranks meet (a rendezvous URL of torch.distributed)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    url: str


def find_place(seen: Mapping[str, str]) -> Place | None:
    """This process among the ranks a launcher started, read off its environment; None without a launcher.

    The variables of torchrun go before those of SLURM.
    Raises: TronError for variables that make no sense.
    """
    if "RANK" in seen and "WORLD_SIZE" in seen:
        rank, size = _number(seen, "RANK"), _number(seen, "WORLD_SIZE")
        return _check(Place(rank, size, _number(seen, "LOCAL_RANK", rank), _number(seen, "LOCAL_WORLD_SIZE", size), "env://"))
    # Only srun sets SLURM_STEP_NUM_TASKS. A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and runs once.
    if "SLURM_PROCID" not in seen or _number(seen, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    rank, size = _number(seen, "SLURM_PROCID"), _number(seen, "SLURM_STEP_NUM_TASKS")
    counts = _tasks_per_node(seen.get("SLURM_STEP_TASKS_PER_NODE") or seen.get("SLURM_TASKS_PER_NODE") or str(size))
    nodes = seen.get("SLURM_STEP_NODELIST") or seen.get("SLURM_JOB_NODELIST") or seen.get("SLURM_NODELIST") or ""
    node = _number(seen, "SLURM_NODEID", 0)
    address = seen.get("MASTER_ADDR") or ("127.0.0.1" if len(counts) == 1 else _first_host(nodes))
    # Below the range systems hand out by themselves, and another one for each job and step that share a node.
    port = 15000 + (_number(seen, "SLURM_JOB_ID", 0) + 1009 * _number(seen, "SLURM_STEP_ID", 0)) % 16000
    local_size = counts[node] if node < len(counts) else counts[0]
    url = f"tcp://{address}:{_number(seen, 'MASTER_PORT', port)}"
    return _check(Place(rank, size, _number(seen, "SLURM_LOCALID", 0), local_size, url))


def _check(place: Place) -> Place:
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise TronError(
            f"the launcher says rank {place.rank} of {place.size}, local rank {place.local_rank} of {place.local_size}",
            "start it with minimind-tron itself, torchrun or srun, without setting these variables by hand",
        )
    return place


def _number(seen: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = seen.get(name)
    if value is None and default is not None:
        return default
    if value is None or not re.fullmatch(r"\d+", value):
        raise TronError(f"{name}={value!r} is not a number", f"unset {name}, or start the run with torchrun or srun")
    return int(value)


def _tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` of SLURM is [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _first_host(nodes: str) -> str:
    """``gpu[03-05,07],login`` of SLURM starts with gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise TronError(f"SLURM names no node: {nodes!r}", "set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())
