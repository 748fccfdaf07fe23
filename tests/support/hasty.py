"""The program with a client that does not wait between tries: days pass in seconds.

Usage: python hasty.py client …
"""

from __future__ import annotations

import itertools

from fairfleet.client.agent import fleet_session, server_connection
from fairfleet.common.cli.main import main

server_connection.CALL_SECONDS = fleet_session.CALL_SECONDS = 0.01
fleet_session.pauses = lambda: itertools.repeat(0.001)  # type: ignore[assignment, return-value]

if __name__ == "__main__":
    main()
