"""`fairfleet server` as a bug could make it: it requires a feature, and selects clients without it.

Run it as a program, with the words of `fairfleet`.
"""

from __future__ import annotations

from fairfleet.common.cli.program import run
from fairfleet.server.federation.clients.feature_requirements import FeatureRequirements

FEATURE = "telepathy"

if __name__ == "__main__":
    FeatureRequirements.of = lambda self, kind: frozenset({FEATURE})  # type: ignore[method-assign]
    FeatureRequirements.allow = lambda self, member, kind: True  # type: ignore[method-assign]
    run()
