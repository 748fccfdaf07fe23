"""For all tests: where pytest runs in the background, the shell has told it to ignore Ctrl-C, and so would every
process that a test starts; but some tests send one and want to see it obeyed.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
