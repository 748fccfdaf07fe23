"""The optional libraries: which extra of FairFleet brings each, and what to say without one.

A command that needs one calls `require` before it writes or starts anything. An import that fails
elsewhere becomes the same message in `common/cli/program.py`. The advice uses the Python that runs:
pip then finds FairFleet installed and adds only what the extra lists.
"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import NamedTuple

from fairfleet.common.errors import UsageError


class Library(NamedTuple):
    """An optional library."""

    name: str  # as a package index has it
    extra: str


LIBRARIES = {
    "PIL": Library("pillow", "plots"),
    "dp_accounting": Library("dp-accounting", "privacy"),
    "grpc_health": Library("grpcio-health-checking", "server"),
    "grpc_reflection": Library("grpcio-reflection", "server"),
    "matplotlib": Library("matplotlib", "plots"),
    "plotly": Library("plotly", "plots"),
    "prometheus_client": Library("prometheus-client", "server"),
    "psycopg": Library("psycopg", "postgresql"),
    "sklearn": Library("scikit-learn", "lab"),
    "sqlalchemy": Library("SQLAlchemy", "server"),
    "tensorboardX": Library("tensorboardX", "tensorboard"),
    "threadpoolctl": Library("threadpoolctl", "server"),
    "torch": Library("torch", "torch"),
}


def require(what: str, *modules: str, extras: str = "", otherwise: str = "") -> None:
    """Raise UsageError unless all these modules are installed; `what` needs them.

    `extras` names the extras to install, if not those of the missing modules; `otherwise` is what
    the user can do instead.
    """
    absent = [module for module in modules if not is_installed(module)]
    if absent:
        raise missing(what, *absent, extras=extras, otherwise=otherwise)


def is_installed(module: str) -> bool:
    """Return whether a module, or the package that contains it, can be found."""
    return find_spec(module.partition(".")[0]) is not None


def missing(what: str, *modules: str, extras: str = "", otherwise: str = "") -> UsageError:
    """Return the error for optional modules that `what` needs and that are not installed."""
    names = [LIBRARIES[module].name for module in modules]
    extras = extras or ",".join(dict.fromkeys(LIBRARIES[module].extra for module in modules))
    verb = "is" if len(names) == 1 else "are"
    return UsageError(
        f"{what} needs {' and '.join(names)}, which {verb} not installed. "
        f"Run {install_command(extras)}{otherwise and f', or {otherwise}'}"
    )


def install_command(extras: str) -> str:
    """Return the command that adds extras to this installation."""
    return f"{shlex.quote(sys.executable)} -m pip install 'fairfleet[{extras}]'"


def optional_module(error: ModuleNotFoundError) -> str | None:
    """Return the optional module whose import failed, or None for any other module."""
    name = (error.name or "").partition(".")[0]
    return name if name in LIBRARIES else None
