"""The lab: datasets, simulations, experiments and reproductions of published tables.

Nothing is exported here: `lab.datasets`, `lab.models` and `lab.digits` are the public modules.
"""
