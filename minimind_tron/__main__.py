"""``python -m minimind_tron`` is the console script."""

import sys


def main() -> None:
    """Hand over to the command line; Ctrl-C while that is still being imported ends quietly, too."""
    try:
        from minimind_tron.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
