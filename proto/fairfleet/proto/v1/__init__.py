"""Version 1 of the protocol, package `fairfleet.v1`."""
