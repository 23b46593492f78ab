"""What every test shares: the pools of ranks, ``--full``, the ``gpu`` mark, and no network."""

import os
from collections.abc import Callable

# Before any test module imports transformers or datasets, and inherited by the workers of the pools.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Gloo binds to the address of the hostname unless told otherwise, and a laptop's hostname need not resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")

import pytest

from tests import pool as pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the whole products (tests marked full)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(skip)


def pytest_sessionfinish() -> None:
    pools.stop_all()


@pytest.fixture(scope="session")
def pool() -> Callable[[int], pools.Pool]:
    """``pool(world_size).run(function, *args)`` runs a function of the test's module on that many ranks."""
    return pools.pool
