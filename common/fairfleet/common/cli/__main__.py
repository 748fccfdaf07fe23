"""Run the program `fairfleet` as `python -m fairfleet.common.cli`."""

from fairfleet.common.cli.main import main

main()
