"""The connected clients: their sessions, their tasks, their requests and how they leave."""

from fairfleet.server.federation.clients.sessions import ClientDescription, Session

__all__ = ["ClientDescription", "Session"]
