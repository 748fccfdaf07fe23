"""`fairfleet privacy`: what the clients of this machine have released of their data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fairfleet.client.cli.options import Json
from fairfleet.client.privacy import Allowance, ReleaseLedger
from fairfleet.client.privacy.ledger import FILE
from fairfleet.client.settings import ClientSettings, default_state_dir
from fairfleet.common.cli.settings import default_text
from fairfleet.common.errors import UsageError, short
from fairfleet.common.privacy_costs import gaussian_epsilon


def privacy(
    state_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="FAIRFLEET_STATE_DIR",
            help="The state directory of the clients.",
            show_default="~/.local/state/fairfleet",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Only this client.", show_default="all of them")
    ] = None,
    delta: Annotated[
        float, typer.Option(help="Delta.", show_default=default_text(ClientSettings, "delta"))
    ] = 1e-5,
    as_json: Json = False,
) -> None:
    """Show what this machine's clients released, and its epsilon.

    Each client counts in its state directory what it sends, over all federations. Epsilon covers
    updates, and reports with noise. It does not cover other reports; they are listed.

    Examples:

      fairfleet privacy

      fairfleet privacy --state-dir /var/lib/fairfleet --json
    """
    if not 0 < delta < 1:
        raise UsageError(f"--delta is {delta:g}; expected a number between 0 and 1, such as 1e-5")
    folder = state_dir or default_state_dir()
    files = sorted(folder.glob(f"{name or '*'}/{FILE}"))
    if not files and not as_json:
        print(f"no client in {folder} has recorded a release yet")
    for file in files:
        ledger = ReleaseLedger(file.parent)
        if as_json:
            print(json.dumps(_record(file.parent.name, ledger, delta)))
        else:
            print("\n".join(_lines(file.parent.name, ledger, delta)))


def _record(client: str, ledger: ReleaseLedger, delta: float) -> dict[str, Any]:
    return {
        "client": client,
        "epsilon": Allowance(ledger, None, delta).epsilon,
        "delta": delta,
        "federations": {
            federation: {
                "epsilon": gaussian_epsilon(cost, delta),
                **{
                    f"{kind}s{'' if noised else '_without_noise'}": count
                    for (owner, kind, noised), count in sorted(ledger.counts.items())
                    if owner == federation
                },
            }
            for federation, cost in ledger.costs.items()
        },
    }


def _lines(client: str, ledger: ReleaseLedger, delta: float) -> list[str]:
    lines = [f"{client}: ε {Allowance(ledger, None, delta).epsilon:.2f} at δ {delta:g}"]
    for federation, cost in ledger.costs.items():
        kinds = sorted(
            (kind, noised, count)
            for (owner, kind, noised), count in ledger.counts.items()
            if owner == federation
        )
        noised_counts = [f"{count} {kind}s" for kind, noised, count in kinds if noised]
        words = ", ".join(noised_counts) or "nothing with noise"
        lines.append(
            f"  federation {short(federation)}: ε {gaussian_epsilon(cost, delta):.2f}, {words}"
        )
        if plain := [f"{kind}s" for kind, noised, _ in kinds if not noised]:
            lines.append(f"    sent without noise: {', '.join(plain)}")
    return lines
