"""env: what a bug report should say about an installation and its machine."""

import platform
import sys
from importlib import metadata

from minimind_tron import __version__
from minimind_tron.runtime import describe_threads, launcher_name

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pydantic", "tyro", "numpy")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def environment() -> list[tuple[str, str]]:
    """Versions, device and backends, as (name, value) lines."""
    import torch
    import torch.distributed as dist

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()} if dist.is_available() else {}
    return [
        ("minimind-tron", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        *((package, _version(package)) for package in PACKAGES),
        ("system", platform.platform()),
        ("GPUs", ", ".join(gpus) or "none"),
        ("CUDA", torch.version.cuda or "not in this torch"),
        ("backends", ", ".join(name for name, is_there in found.items() if is_there) or "none"),
        ("launcher", launcher_name()),
        *describe_threads(),
    ]


def run() -> None:
    """Print the environment."""
    lines = environment()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
