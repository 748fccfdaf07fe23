"""The demo: a real server and ten real clients on this machine.

Nothing is exported here: an entry point in pyproject.toml names the command.
"""
