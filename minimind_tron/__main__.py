"""``python -m minimind_tron`` is the console script."""

from minimind_tron.cli import main

main()
