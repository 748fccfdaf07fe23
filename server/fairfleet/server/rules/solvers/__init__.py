"""Arithmetic on Gram matrices, and solvers for the shortest combination of rows."""
