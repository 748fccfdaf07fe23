from __future__ import annotations

from tests.e2e.conftest import fleet as fleet  # real processes, as the end-to-end tests have them
