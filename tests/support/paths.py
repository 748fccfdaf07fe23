"""Where the repository and the folder shared with other projects are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# This folder may be missing; tests that need it are skipped then.
SHARED = Path(os.environ.get("FAIRFLEET_SHARED", ROOT.parent / "shared"))
