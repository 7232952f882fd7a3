"""``python -m reports``."""

from reports.cli import main

main()
