"""``python -m calibration``."""

from calibration.cli import main

main()
