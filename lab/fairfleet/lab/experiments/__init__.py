"""Experiments: their description, sweeps over them, runs and records.

The exported names load no torch. What trains is in `runner` and `sweep_runner`, which do.
"""

from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Ledger, Point, Run
from fairfleet.lab.experiments.sweep import PlannedRun, Sweep

__all__ = ["Experiment", "Ledger", "PlannedRun", "Point", "Run", "Sweep"]
