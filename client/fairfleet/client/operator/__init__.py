"""What operators see: the connection to a server, views of a federation, and screens.

Nothing is exported here, so that a command without a screen does not load one.
"""
