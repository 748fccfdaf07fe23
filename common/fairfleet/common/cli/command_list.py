"""The commands that `fairfleet --help` lists, in groups, each with one line.

The list is written down here, so that the overview appears without importing any command: some of
them load the server's database or a whole laboratory. A test compares each line with the help of
the command itself. A command that another package adds is not in the list; it is imported.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandSummary(NamedTuple):
    """One command in the overview."""

    name: str
    text: str  # the first line of the command's own help
    needs: str | None = None  # a library of an extra; without it the command is not shown


GROUPS: dict[str, tuple[CommandSummary, ...]] = {
    "Get started": (
        CommandSummary("demo", "Run a demo federation with ten clients on this machine."),
        CommandSummary("new", "Write a small project of your own, which runs at once."),
        CommandSummary("init", "Write a task's untrained model to a .safetensors file."),
    ),
    "Run a federation": (
        CommandSummary("server", "Run the server of one federation.", "sqlalchemy"),
        CommandSummary("client", "Train in a federation with the data of this machine."),
        CommandSummary("pause", "Start no new round until `fairfleet resume`."),
        CommandSummary("resume", "Continue a paused federation."),
        CommandSummary("stop", "End the federation after the current round."),
        CommandSummary(
            "continue", "Let a finished federation go on, also from an earlier version."
        ),
        CommandSummary("export", "Download a committed model as a .safetensors file."),
    ),
    "Watch it": (
        CommandSummary("status", "Show federation status and per-client figures, worst first."),
        CommandSummary("watch", "Show rounds as they happen, until the federation finishes."),
        CommandSummary("rounds", "List the newest rounds and what each step did."),
        CommandSummary("models", "List the versions that are kept, with their scores."),
        CommandSummary("clients", "List all clients of the federation, worst served first."),
        CommandSummary("audit", "List what operators did, and changes of the settings."),
        CommandSummary("privacy", "Show what this machine's clients released, and its epsilon."),
        CommandSummary("health", "Check whether a server is serving.", "grpc_health"),
    ),
    "Secure it": (
        CommandSummary("pki", "Create the federation's CA and the server's certificate."),
        CommandSummary("enroll", "Create the credentials of a client or an operator."),
        CommandSummary("token", "Create a one-time token that enrolls a device."),
        CommandSummary("renew", "Renew credentials before they expire."),
        CommandSummary("revoke", "Exclude a client or an operator permanently."),
    ),
    "Research": (
        CommandSummary("rules", "List the aggregation rules, or check them with test vectors."),
        CommandSummary("partition", "Divide a dataset among clients and show their labels."),
        CommandSummary("simulate", "Train a fleet of simulated clients in one process."),
        CommandSummary("compare", "Compare rules, settings and codecs over several seeds."),
        CommandSummary("reproduce", "Run the experiment of a published table again."),
    ),
    "Develop": (
        CommandSummary(
            "conformance", "Check a client in any language against a faulty server.", "sqlalchemy"
        ),
    ),
}
