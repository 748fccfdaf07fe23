"""What a client keeps on its disk, in the folder of the federation that it takes part in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fairfleet.client.update.federation_folder import (
    FederationFolder,
    FederationIdentity,
    open_folder,
)
from fairfleet.common import wire
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)


class StoredPart(Protocol):
    """A part of the client's state, with files in one folder."""

    def move_to(self, folder: Path) -> None:
        """Use another folder from now on; the files of the present one stay there."""


class LocalState:
    """The parts of the client's state, all in the folder of one federation at a time."""

    def __init__(self, home: Path, parts: Sequence[StoredPart]) -> None:
        """`home` is the client's folder, which has the folders of its federations."""
        self._home, self._parts = home, parts
        self._folder: FederationFolder | None = None

    def enter(self, joined: pb.JoinResponse, pause: Callable[[float], None]) -> None:
        """Use the folder of the federation that was joined; `pause` waits while it is locked."""
        self.leave()
        signature = wire.signature_in(joined.signature)
        federation = FederationIdentity(joined.federation, joined.federation_id, signature)
        self._folder = open_folder(self._home, federation, pause)
        for part in self._parts:
            part.move_to(self._folder.path)

    def renew_if_deleted(self, joined: pb.JoinResponse, pause: Callable[[float], None]) -> None:
        """Make the folder again if somebody deleted it: the next update needs it."""
        if self._folder is not None and self._folder.is_deleted:
            log.warning("%s was deleted while it is in use; it is made again", self._folder.path)
            self.enter(joined, pause)

    def leave(self) -> None:
        """Let another process use the folder."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None
