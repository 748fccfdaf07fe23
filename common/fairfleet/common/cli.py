"""Where the program `fairfleet` begins: what must be settled before the rest of it is imported."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    # A container's first process is sent SIGTERM in vain until it has a handler, and some commands load for long.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # grpc reads this once, when it is imported. Its core tells of every connection that a server ends, to anyone's
    # screen; but the server's own log is to have what it tells: why a handshake was refused, for one.
    if sys.argv[1:2] != ["server"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from fairfleet.common.program import run

    run()


if __name__ == "__main__":
    main()
