"""Files that a command is going to write: what cannot be one is refused before the work starts, or in one line."""

import os
from collections.abc import Callable
from pathlib import Path

from minimind_tron.config import flag
from minimind_tron.errors import TronError


def _flag(name: str) -> str:
    return flag(name.removesuffix("_file"))


def placed(name: str, path: Path | None, made: Path | None = None) -> None:
    """Refuse a path that cannot be a new file; the folder ``made`` need not be there yet."""
    if path is None:
        return
    if path.is_dir():
        raise TronError(f"{name}={path} is a folder, a file is wanted", f"change {_flag(name)}")
    if not path.parent.is_dir() and path.parent != made:
        raise TronError(f"{name}={path}: the folder {path.parent} is not there", f"make it, or change {_flag(name)}")


def distinct(files: dict[str, tuple[Path, ...]]) -> None:
    """Refuse one file for two things."""
    taken: dict[str, str] = {}
    for name, paths in files.items():
        for path in paths:
            other = taken.setdefault(os.path.abspath(path), name)
            if other != name:
                raise TronError(f"{path} would be written for {other} and for {name}", f"change {_flag(name)}")


def try_to_write(name: str, path: Path) -> None:
    """Refuse a path that cannot be opened for writing; nothing is left behind."""
    new = not path.exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise TronError(f"{name}: {path} cannot be written ({error.strerror})", f"change {_flag(name)}") from None


def write(name: str, path: Path | None, draw: Callable[[Path], object]) -> list[Path]:
    """Let something be drawn into a file, where one was asked for; which files there are now.

    Raises: TronError for a file that cannot be written.
    """
    if path is None:
        return []
    try:
        draw(path)
    except OSError as error:
        spelled = flag(name.removesuffix("_file"))
        raise TronError(f"{spelled} {path} cannot be written ({error.strerror})", f"change {spelled}") from None
    return [path]
