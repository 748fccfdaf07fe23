"""Entry point of the program `fairfleet`.

It does what must happen before the rest of the program is imported: signals and gRPC's logging.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command that the command line names, and exit with its exit code."""
    # The first process of a container receives SIGTERM only if it handles it, and some commands
    # take long to load. So the handler is installed before anything else is imported.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # gRPC reads this variable once, when it is imported. Its core logs every connection that a
    # server closes, which is noise on the screen of a client or an operator. The server keeps
    # these messages in its log, because they say why a handshake was refused.
    if sys.argv[1:2] != ["server"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from fairfleet.common.cli.program import run

    run()
