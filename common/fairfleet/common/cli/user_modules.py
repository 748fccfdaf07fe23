"""Import the modules that users name on the command line, such as `my_task` in `my_task:task`.

A module is searched in the current directory first, as `python -m` does, and then among the
installed packages. The search path is as before after the import, whatever the module did to it or
to the current directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """Return a module from the current directory or from the installed packages.

    Raises ModuleNotFoundError if there is no such module, and whatever the module itself raises.
    """
    folder = os.getcwd()  # read once: the module may change the current directory
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        with suppress(ValueError):  # the module may have removed the folder itself
            sys.path.remove(folder)
