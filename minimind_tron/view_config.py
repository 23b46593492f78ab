"""What a command is told that draws and runs nothing: schedules, and a mesh; checked as ``config`` is."""

from pathlib import Path
from typing import Annotated, ClassVar, Self, get_args

import tyro
from pydantic import model_validator

from minimind_tron.config import Config, flag
from minimind_tron.cut_config import CutConfig
from minimind_tron.errors import TronError
from minimind_tron.new_files import distinct, placed
from minimind_tron.run_config import TrainConfig, ValidateConfig
from minimind_tron.topology import ScheduleName, virtual_stages_of

# Forwards in all drawings of one command, and times that can be drawn beside each other.
DRAWABLE = 10_000
COSTS = (1e-6, 1e6)
# Ranks in a drawing of a mesh.
MOST_RANKS = 1024


class ScheduleConfig(Config):
    """Draw pipeline schedules side by side, without running them."""

    pp_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 4
    """Stages."""
    pp_schedule: tuple[ScheduleName, ...] = get_args(ScheduleName)
    """One schedule or several; all unless given."""
    virtual_stages: int | None = None
    """Chunks of the model on each stage, for interleaved: 2 unless given."""
    num_microbatches: int = 8
    """Microbatches of a step."""
    cost_forward: float = 1.0
    """Time of a stage's forward of one microbatch."""
    cost_input_gradient: float = 1.0
    """Time of a stage's input gradient."""
    cost_weight_gradient: float = 1.0
    """Time of a stage's weight gradient."""
    cost_message: float = 0.0
    """Time of a message between stages; it keeps nobody busy."""
    png: Path | None = None
    """Where the drawing goes as a picture."""
    html: Path | None = None
    """Where the drawing goes as a page of its own, with what every action waited for."""
    json_file: Annotated[Path | None, tyro.conf.arg(aliases=["--json"])] = None
    """Where schedules, messages and times go as JSON."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(1, "pp_size", "virtual_stages", "num_microbatches")
        files = {name: getattr(self, name) for name in ("png", "html", "json_file")}
        for name, path in files.items():
            placed(name, path)
        distinct({name: (path,) for name, path in files.items() if path})
        if not self.pp_schedule:
            raise TronError("pp_schedule names no schedule", f"give one of {', '.join(get_args(ScheduleName))}")
        if self.virtual_stages is not None and "interleaved" not in self.pp_schedule:
            raise TronError(
                f"virtual_stages={self.virtual_stages} was given, and only interleaved takes a number of them",
                "leave it out, or add interleaved to --pp-schedule",
            )
        self._check_costs()
        self._check_size()
        return self

    def _check_costs(self) -> None:
        for name in ("cost_forward", "cost_input_gradient", "cost_weight_gradient", "cost_message"):
            value = getattr(self, name)
            least = COSTS[0] if name == "cost_forward" or value else 0.0
            if not least <= value <= COSTS[1]:
                zero = "" if name == "cost_forward" else "0, or "
                raise TronError(f"{name}={value} was given, {zero}{COSTS[0]:g} to {COSTS[1]:g} is wanted", f"change {flag(name)}")

    def _check_size(self) -> None:
        asked = {"interleaved": self.virtual_stages}
        virtual = [virtual_stages_of(name, asked.get(name)) for name in dict.fromkeys(self.pp_schedule)]
        forwards = self.pp_size * self.num_microbatches * sum(virtual)
        if forwards > DRAWABLE:
            raise TronError(
                f"{forwards} forwards were asked for in all schedules, and no eye can follow more than {DRAWABLE}",
                "lower --pp-size or --num-microbatches, or give fewer of --pp-schedule",
            )


class MeshCommandConfig(CutConfig):
    """Show which rank holds what, without starting any rank."""

    overlooks: ClassVar[tuple[type[Config], ...]] = (TrainConfig, ValidateConfig)
    rank: int | None = None
    """Show this rank in full, instead of the whole mesh."""
    html: Path | None = None
    """Where the mesh goes as a page of its own, with every rank in full."""

    @property
    def samples(self) -> int:
        """Samples in the global batch: a microbatch on every rank of dp, where no number is given."""
        batch = self.batch
        given = batch.global_batch_size or batch.num_microbatches
        return batch.samples if given else batch.micro_batch_size * self.mesh.dp_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_least(0, "rank")
        ranks = self.mesh.world_size
        if ranks > MOST_RANKS:
            raise TronError(
                f"{ranks} ranks were asked for, and no eye can follow more than {MOST_RANKS}",
                "lower --dp-size: along it, ranks differ in their samples and in shards by ZeRO only",
            )
        if self.rank is not None and self.rank >= ranks:
            raise TronError(f"rank={self.rank} was given, but the mesh has ranks 0 to {ranks - 1}", "change --rank")
        placed("html", self.html)
        return self
