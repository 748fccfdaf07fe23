"""Pure decisions about rounds: state machine, selection, deadlines, stopping, verification."""

from fairfleet.server.rounds.attendance import AttendanceBook
from fairfleet.server.rounds.round_state import Phase, Policy, Round
from fairfleet.server.rounds.selection import Candidate, Selection
from fairfleet.server.rounds.state_machine import Event, resume, step
from fairfleet.server.rounds.stopping import StopConditions

__all__ = [
    "AttendanceBook",
    "Candidate",
    "Event",
    "Phase",
    "Policy",
    "Round",
    "Selection",
    "StopConditions",
    "resume",
    "step",
]
