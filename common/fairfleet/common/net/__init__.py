"""Addresses, channels and how a server is reached.

Nothing is exported here, because only some of the modules need gRPC.
"""
