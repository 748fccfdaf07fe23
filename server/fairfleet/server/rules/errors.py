"""The errors of rules and server optimizers; each says what was found and what to do.

They have a module of their own because optimizers raise them too, and the registry of rules
imports the optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence


class RuleError(ValueError):
    """A rule or optimizer cannot be built, or cannot process what this round contains."""


class UnusableReport(RuleError):
    """Clients did not report a value, or reported one for which the rule is not defined.

    `clients` contains their names.
    """

    def __init__(self, message: str, clients: Sequence[str]) -> None:
        """Store the message and the names of the clients."""
        super().__init__(message)
        self.clients = tuple(clients)


class NonFiniteChoice(RuleError):
    """A rule's coefficients, or its next state, are not finite. Neither may be used."""


class NonFiniteStep(RuleError):
    """The step, or the optimizer's next state, is not finite. Neither may be used."""
