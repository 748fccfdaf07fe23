"""Rules as text: parse `fedfv,alpha=0.1` into a recipe.

The registry of the server checks names and parameters. Every mistake becomes a UsageError
that quotes the text.
"""

from __future__ import annotations

from fairfleet.common.errors import UsageError
from fairfleet.server.rules import Recipe, RuleError, optimizer, recipe


def parse_rule(text: str, optimizer_text: str | None = None) -> Recipe:
    """Return the recipe for a rule such as `adafed,gamma=5`.

    An optimizer such as `sgd,eta=0.5` replaces the rule's own. Raise UsageError for an unknown
    name or parameter.
    """
    try:
        name, parameters = name_and_parameters(text)
        if optimizer_text is None:
            return recipe(name, **parameters)
        optimizer_name, optimizer_parameters = name_and_parameters(optimizer_text)
        return recipe(name, optimizer(optimizer_name, **optimizer_parameters), **parameters)
    except RuleError as error:
        raise UsageError(f"rule {text}: {error}") from None


def name_and_parameters(text: str) -> tuple[str, dict[str, str]]:
    """Split a text such as `adafed,gamma=5`. Raise UsageError for a repeated parameter."""
    name, *pairs = text.replace(" ", "").split(",")
    keys = [pair.partition("=")[0] for pair in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise UsageError(
            f"rule {text} sets {', '.join(repeated)} more than once; give each parameter once"
        )
    return name, {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
