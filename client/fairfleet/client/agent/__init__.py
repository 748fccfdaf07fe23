"""The client process: its loop, its connection to the server, heartbeats and metrics.

Nothing is exported here, so that the modules that need no gRPC can be imported without it.
"""
