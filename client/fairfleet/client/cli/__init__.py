"""The commands of clients and operators.

Nothing is exported here: entry points in pyproject.toml name the commands.
"""
