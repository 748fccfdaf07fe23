"""Local training: batches, solvers, budgets, personal models and trials of steps."""

from fairfleet.client.training.budget import Budget, Training

__all__ = ["Budget", "Training"]
