"""Checks clients in any language: a real server whose answers contain faults."""
