"""The `fairfleet` program: its commands, settings, logs and output.

Nothing is exported here, so that `fairfleet --help` loads only what it needs.
"""
