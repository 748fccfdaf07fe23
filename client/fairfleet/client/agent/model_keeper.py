"""Models that a participant keeps: saved to its file, and given to its task.

This happens after each evaluation, and at the end with the federation's result. The terms of the
federation (`JoinResponse.kept_models`) may allow only the result, or nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fairfleet.client.agent.fleet_session import Stopped
from fairfleet.client.agent.model_cache import ModelCache
from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.task import Keeping, Task
from fairfleet.common.atomic_files import TEMP_SUFFIX, write_atomically
from fairfleet.common.errors import FleetError, UsageError, short
from fairfleet.common.features import software
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)

STALL_SECONDS = 60.0  # without a byte of the result, the server counts as gone
EVERY_MODEL = (pb.KEPT_MODELS_UNSPECIFIED, pb.KEPT_MODELS_RECEIVED)
RESULT_ALLOWED = (*EVERY_MODEL, pb.KEPT_MODELS_FINAL)
UNKNOWN_TERMS = "the terms for participants' models are not known to this version"
TERMS = {
    pb.KEPT_MODELS_NONE: "participants may keep no model",
    pb.KEPT_MODELS_FINAL: "participants may keep only its result, at the end",
}


class ModelKeeper:
    """Keeps models as far as the federation's terms allow; does nothing if nobody wants them."""

    def __init__(
        self,
        name: str,
        task: Task,
        path: Path | None,
        connection: ServerConnection,
        models: ModelCache,
    ) -> None:
        """Prepare to keep models; nothing is written before the first one.

        `name` is the client's, `path` the file to write, or None. Raises UsageError if it cannot be
        written.
        """
        self._name, self._task, self._path = name, task, path
        self._connection, self._models = connection, models
        self._is_wanted = path is not None or isinstance(task, Keeping)
        if path is not None:
            # A link stays a link: the file that it leads to is written.
            self._path = Path(os.path.realpath(path))
            check_writable(self._path)

    def explain_terms(self) -> None:
        """Log, after a join, if the federation's terms forbid what was requested here."""
        joined = self._connection.joined
        if self._path is not None and self._terms not in EVERY_MODEL:
            written = "is written then" if self._terms in RESULT_ALLOWED else "is not written"
            log.warning(
                "in federation %s, %s (clients_keep of its server): %s %s. This client trains "
                "all the same.",
                short(joined.federation),
                TERMS.get(self._terms, UNKNOWN_TERMS),
                self._path,
                written,
            )

    def evaluated(self) -> None:
        """Keep the model that was just evaluated."""
        if not self._is_wanted or self._terms not in EVERY_MODEL:
            return
        if problem := self._keep_received():
            log.error("%s; training goes on", problem)

    def finished(self, end: pb.Finished) -> None:
        """Fetch and keep the federation's result; the last received model from an older server.

        Raises UsageError if it cannot be written.
        """
        if not self._is_wanted or self._terms not in RESULT_ALLOWED:
            return
        if end.HasField("model"):
            if not self._fetch(end.model):
                return
        elif self._terms not in EVERY_MODEL:
            return
        if problem := self._keep_received():
            raise UsageError(problem)

    @property
    def _terms(self) -> pb.KeptModels.ValueType:
        return self._connection.joined.kept_models

    def _fetch(self, ref: pb.ModelRef) -> bool:
        """Fetch the result; return whether it is there. Raises Stopped if a person stops that."""
        is_stalled = threading.Event()
        try:
            with self._stopping_when_stalled(is_stalled):
                self._models.fetch(ref)
        except (FleetError, Stopped) as error:
            if isinstance(error, Stopped) and not is_stalled.is_set():
                raise
            log.error(
                "version %d, the federation's result, could not be fetched (%s). An operator can "
                "still export it.",
                ref.version,
                str(error) or "the server does not answer",
            )
            return False
        return True

    @contextmanager
    def _stopping_when_stalled(self, is_stalled: threading.Event) -> Iterator[None]:
        """Stop the connection if nothing arrives: a server that has ended will not come back.

        `is_stalled` is set before that.
        """
        done, counters = threading.Event(), self._connection.counters

        def watch() -> None:
            before = -1
            while not done.wait(STALL_SECONDS):
                if counters.received_bytes == before:
                    is_stalled.set()
                    self._connection.stop()
                    return
                before = counters.received_bytes

        threading.Thread(target=watch, name="result", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _keep_received(self) -> str:
        """Save the received model and give it to the task; return why it was not saved, or ""."""
        if (held := self._models.held) is None:
            log.warning("there is no model to keep: this client holds none that is complete")
            return ""
        problem = ""
        if self._path is not None:
            try:
                self._save(self._path, *held)
            except OSError as error:
                problem = f"cannot write {self._path}: {error.strerror}"
        if isinstance(self._task, Keeping):
            self._give_to_task(self._task, held[0])
        return problem

    def _save(self, path: Path, version: int, digest: bytes) -> None:
        joined = self._connection.joined
        metadata = {
            "federation": joined.federation,
            "federation_id": joined.federation_id,
            "version": str(version),
            "digest": digest.hex(),
            "software": software(),
        }

        def save(temp_path: Path) -> None:
            self._models.received.save(temp_path, **metadata)

        write_atomically(path, save, temp_suffix=self._temp_suffix())
        log.info("saved version %d to %s", version, path, extra={"round": version})

    def _temp_suffix(self) -> str:
        """Return a suffix of this client in its federation: others may write the same file.

        It is the same after a restart, so a killed process leaves at most one temporary file.
        """
        owner = f"{self._connection.joined.federation_id} {self._name}".encode()
        return f".{hashlib.sha256(owner).hexdigest()[:8]}{TEMP_SUFFIX}"

    def _give_to_task(self, task: Keeping, version: int) -> None:
        arrays = self._models.received.named()
        for array in arrays.values():
            array.flags.writeable = False
        try:
            task.on_model(version, arrays)
        except Exception:  # the task is a user's code and may raise anything
            log.exception("on_model failed for version %d", version, extra={"round": version})


def check_writable(path: Path) -> None:
    """Raise UsageError if a model cannot be saved to this file, or would replace another one."""
    # Unlike the methods of Path, these return False where a folder cannot be read.
    if os.path.isdir(path):
        raise UsageError(f"--save-model {path} is a folder; give the name of a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"--save-model {path} is not a regular file; give the name of a file")
    if os.path.exists(path) and not _is_safetensors(path):
        raise UsageError(
            f"--save-model {path} exists and is not a safetensors file; it is not replaced. "
            "Give another file, or remove it"
        )
    temp_path = path.with_name(f"{path.name}.{os.getpid()}{TEMP_SUFFIX}")
    try:
        temp_path.touch()
    except OSError as error:
        raise UsageError(
            f"--save-model {path} cannot be written: {error.strerror}. Give a file in a folder "
            "that exists and that this user may write to"
        ) from error
    finally:
        with suppress(OSError):
            temp_path.unlink(missing_ok=True)


def _is_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False
