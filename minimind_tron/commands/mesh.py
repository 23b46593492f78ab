"""mesh: which rank holds what, read off the layouts of a model that is built without memory; no rank is started."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from minimind_tron.holdings import Holding, holding_of, holdings_of
from minimind_tron.mesh import groups_in_order
from minimind_tron.mesh_page import page
from minimind_tron.mesh_text import draw, draw_rank
from minimind_tron.new_files import write
from minimind_tron.runtime import say
from minimind_tron.view_config import MeshCommandConfig

NARROWEST = 60


@dataclass(frozen=True)
class MeshResult:
    """What was shown, of all ranks or of the one that was asked for, and the files that were written."""

    holdings: tuple[Holding, ...]
    files: tuple[Path, ...]
    exit_code: int = 0


def run(config: MeshCommandConfig) -> MeshResult:
    """Build every rank's model without memory, ask it what it holds, print, and write the page where one was asked for.

    Cost: some milliseconds a rank. Raises: TronError for a file that cannot be written.
    """
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    asked_for_all = config.rank is None or config.html is not None
    holdings = holdings_of(config) if asked_for_all else (holding_of(config, config.rank or 0),)
    groups = groups_in_order(config.mesh)
    if config.rank is None:
        say(draw(config, holdings, groups, width))
    else:
        say(draw_rank(config, next(each for each in holdings if each.rank == config.rank), width))
    files = write("html", config.html, lambda path: path.write_text(page(config, holdings, groups), encoding="utf-8"))
    if files:
        say(f"wrote {', '.join(map(str, files))}")
    return MeshResult(holdings, tuple(files))
