"""The commands of the lab: simulate, compare, reproduce and partition.

Nothing is exported here: entry points in pyproject.toml name the commands.
"""
