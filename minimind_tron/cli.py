"""Flags to config, config to a command, errors to one line.

torch is imported only once a command really runs: help, versions and every mistake that needs no process answer at once.
"""

import argparse
import contextlib
import importlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from minimind_tron import __version__
from minimind_tron.config import Config, flag, nearest
from minimind_tron.config_files import ALIASES, fields_of, from_toml, with_weights
from minimind_tron.errors import TronError
from minimind_tron.run_config import RunConfig, TrainConfig, ValidateConfig
from minimind_tron.view_config import MeshCommandConfig, ScheduleConfig


@dataclass(frozen=True)
class Command:
    """A command: what it is told, and the module that does it.

    On ranks: ``check(config)`` of the module refuses, before they are started, files that every rank would refuse; ``run(config,
    world)`` is the command, on every rank. ``timeout_s`` is how long a rank may wait for another: in validate all wait for rank 0
    while it runs the dense model. A command that needs no ranks has ``run(config)`` alone, and no timeout.
    """

    name: str
    config: type[Config]
    summary: str
    timeout_s: float | None

    @property
    def module(self) -> str:
        """Where ``check`` and ``run`` are."""
        return f"minimind_tron.commands.{self.name}"


COMMANDS = {
    command.name: command
    for command in (
        Command("train", TrainConfig, "train on text over any mesh, and export the model", 600.0),
        Command("validate", ValidateConfig, "prove the parallel model equal to the dense one", 6 * 3600.0),
        Command("schedule", ScheduleConfig, "draw pipeline schedules side by side, without running them", None),
        Command("mesh", MeshCommandConfig, "show which rank holds what, without starting any", None),
    )
}
USAGE = f"""usage: minimind-tron COMMAND [flags]      (the same as python -m minimind_tron)

MiniMind {__version__}, a Qwen3-shaped language model, trained with n-D parallelism that is proven equal to the dense model.

commands:
{"".join(f"  {name:<10} {command.summary}{chr(10)}" for name, command in COMMANDS.items())}\
  {"env":<10} print versions, device and backend, for a bug report

  --help     this text; minimind-tron COMMAND --help lists the flags of a command
  --version  the version
"""


def _one_line(boxed: str) -> str:
    """The first paragraph of tyro's message, without the frame, which is ASCII where stdout is not UTF-8."""
    words: list[str] = []
    for line in boxed.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if not set(text) <= {"─", "-"}:
            words.append(text)
        elif words:
            break
    return re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", " ".join(words))


def _unknown(argument: str, config: type[Config]) -> TronError:
    if argument.lower() in ("true", "false", "yes", "no", "on", "off", "0", "1"):
        return TronError(f"the value {argument} follows a switch, which takes none", "write --switch or --no-switch")
    name = argument.lstrip("-").split("=")[0]
    for command, other in COMMANDS.items():
        if argument.startswith("--") and ALIASES.get(name, name.replace("-", "_")) in fields_of(other.config):
            return TronError(f"{argument} is a flag of {command}, not of this command", "leave it out")
    fields = fields_of(config)
    hint = nearest(name, [*fields, *(short for short, long in ALIASES.items() if long in fields), "config"])
    if hint:
        guess = hint.removeprefix("did you mean ").removesuffix("?")
        hint = f"did you mean {flag(guess)}?"
    return TronError(f"{argument} is not a known flag", hint or "see --help")


def parse(command: str, arguments: list[str]) -> Config:
    """The config that flags and ``--config`` file describe; flags win.

    Raises: TronError for unknown flags, values of the wrong type and everything the config checks. SystemExit after --help.
    """
    import tyro

    kind = COMMANDS[command].config
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument or argument.endswith("="):
            raise TronError(f"{argument.rstrip('=') or before or 'an argument'} was given an empty value", "give a value")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    try:
        file, rest = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise TronError(f"--config: {error.message}", "give the path of a TOML file") from None
    given = {argument.split("=")[0].lstrip("-").replace("-", "_") for argument in rest if argument.startswith("--")}
    defaults = from_toml(kind, file.config, given) if file.config else None
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught):
            config, unknown = tyro.cli(
                kind,
                prog=f"minimind-tron {command}",
                description=f"{kind.__doc__}\n\n--config FILE takes the same keys as TOML; flags win.",
                args=rest,
                default=defaults,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise TronError(_one_line(caught.getvalue()).rstrip("."), f"see minimind-tron {command} --help") from None
    if unknown:
        raise _unknown(unknown[0], kind)
    assert config is not None, "tyro returns a config or exits"
    return with_weights(config) if isinstance(config, ValidateConfig) else config


def run(arguments: list[str]) -> int:
    """Run a command line; returns the exit code.

    Raises: TronError for a mistake of the user.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if name == "--version":
        print(f"minimind-tron {__version__}")
        return 0
    if name == "env" and rest in (["--help"], ["-h"]):
        print("usage: minimind-tron env\n\nPrint versions, device and backends, for a bug report; it takes no flags.")
        return 0
    if name == "env" and not rest:
        importlib.import_module("minimind_tron.commands.env").run()
        return 0
    if name not in COMMANDS:
        what = f"{rest[0]} was given to env, which takes nothing" if name == "env" else f"{name} is not a command"
        raise TronError(what, nearest(name, COMMANDS) or f"use one of {', '.join([*COMMANDS, 'env'])}")
    config = parse(name, rest)
    if isinstance(config, RunConfig):
        return _run_on_ranks(name, config, arguments)
    return importlib.import_module(COMMANDS[name].module).run(config).exit_code


def _run_on_ranks(name: str, config: RunConfig, arguments: list[str]) -> int:
    from minimind_tron import runtime

    ranks = config.mesh.world_size
    if runtime.launched():
        config.mesh.check_world(runtime.launched_world_size() or 1, config.model)
    else:
        config.check_before_start()
        if ranks > 1:
            importlib.import_module(COMMANDS[name].module).check(config)
            return runtime.launch(arguments, ranks, device=config.device)
    timeout_s = COMMANDS[name].timeout_s
    assert timeout_s is not None, f"{name} runs on ranks"
    with runtime.session(device=config.device, timeout_s=timeout_s) as world:
        return importlib.import_module(COMMANDS[name].module).run(config, world).exit_code


def main() -> NoReturn:
    """The console script. Exit codes: 0, 1 for a failed validation or run, 2 for a mistake of the user."""
    from minimind_tron import runtime

    try:
        code = run(sys.argv[1:])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException as error:
        code = runtime.report(error)
    runtime.leave(code)
