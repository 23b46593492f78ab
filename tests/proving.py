"""validate on the workers of a pool, and the names of what it is run on."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from minimind_tron.commands import validate
from minimind_tron.judge import Report
from minimind_tron.layout import layout_of
from minimind_tron.model import Model, build_model
from minimind_tron.run_config import ValidateConfig
from tests.covering import Row
from tests.meshes import mesh_of
from tests.pool import Pool

Pools = Callable[[int], Pool]


@contextmanager
def one_thread() -> Iterator[None]:
    """For tensors this small, and ranks that share few cores, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.object(validate, "all_cores", contextlib.nullcontext):
            yield
    finally:
        torch.set_num_threads(threads)


def on_rank(config: ValidateConfig) -> Report:
    """This rank's report."""
    with mock.patch.object(validate, "say"), one_thread():
        return validate.validate(config, mesh_of(config.mesh), torch.device("cpu"))


def passes(pool: Pools, config: ValidateConfig) -> None:
    """Fail with the verdict unless the model on its mesh is the dense model."""
    report = pool(config.mesh.world_size).run(on_rank, config)[0]
    assert config.compute_dtype != "float64" or report.rule == "exact"
    assert report.passed, validate.verdict(report)


def without_sums(*names: str) -> Any:
    """Parameters whose layout no longer says that their gradient is a part, over any axis."""

    def built(*args: Any) -> Model:
        found = build_model(*args)
        for name, weight in found.named_parameters():
            if any(part in name for part in names):
                weight.whole = dataclasses.replace(layout_of(weight), partial=())
        old = found.masters
        found.masters = type(old)({name: kept.weight for name, kept in old.kept.items()}, old.segments, old.axis)
        return found

    return mock.patch.object(validate, "build_model", built)


def name_of(row: Row) -> str:
    """A row as the name of a test."""
    return "-".join(f"{key}={value}" for key, value in row.items())


def rows_of(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]
