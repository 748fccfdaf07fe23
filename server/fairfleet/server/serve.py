"""The server process: state directory, coordinator, gRPC services, signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import disable_created_metrics
from sqlalchemy.exc import DBAPIError
from threadpoolctl import threadpool_limits

from fairfleet.common.errors import StateDirError, UsageError
from fairfleet.common.keepalive import SERVER_OPTIONS
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2, operator_pb2
from fairfleet.server.connection_limits import connection_limits, http_limits, keep_log_short
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.downlink import DOWNLINK, Downlink
from fairfleet.server.fleet_service import RAW_STREAMS, FleetService
from fairfleet.server.guarding import ENROLMENT, Guarding, check_transport, http_token
from fairfleet.server.handlers import service_handler
from fairfleet.server.http_endpoint import HttpEndpoint
from fairfleet.server.http_hosts import with_hosts
from fairfleet.server.http_token import with_token
from fairfleet.server.monitoring import Monitoring
from fairfleet.server.operator_service import OperatorService
from fairfleet.server.publication import Publication
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store

log = logging.getLogger(__name__)

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["Operator"]
GRACE_SECONDS = 3.0
STOPPING = (signal.SIGTERM, signal.SIGINT)


def open_store(settings: ServerSettings) -> Store:
    """The state directory, with a federation in it: an old one, or a new one that begins with the given model."""
    store = Store(settings.state_dir, settings.database)
    try:
        with store.explained():
            _found_federation(store, settings)
    except BaseException:
        store.close()
        raise
    return store


def _found_federation(store: Store, settings: ServerSettings) -> None:
    if settings.model is None:
        if not store.has_federation:
            raise UsageError(
                f"{settings.state_dir} holds no federation yet, and no initial model was given. Make one with "
                f"`fairfleet init --task module:name --output model.safetensors` and start the server with "
                "--model model.safetensors."
            )
        return
    _check_size(settings.model, settings.limits.model_bytes)
    model, _ = Model.load(settings.model)
    if store.has_federation:
        difference = store.signature().difference(model.signature)
        if difference:
            raise UsageError(
                f"{settings.state_dir} holds a federation of another model than {settings.model}: {difference}. "
                "Leave out --model to go on with it, or give a new --state-dir."
            )
        log.info("going on with the federation in %s; the given model is not used", settings.state_dir)
        return
    held_back = Downlink(model=settings.compression.model).rounded(model)
    vectors = {} if held_back is None else {DOWNLINK: held_back}
    store.create(settings.name, model, Publication.of(0, model).digest, vectors)


def _check_size(model: Path, limit_bytes: int) -> None:
    """Before it is read: every row of every round takes as much again."""
    size = model.stat().st_size if model.exists() else 0  # what is not there is told of by whoever reads it
    if size > limit_bytes:
        raise UsageError(
            f"{model} has {size} bytes; this server takes models of at most {limit_bytes}. Set limits.model_bytes "
            "higher if that is meant."
        )


async def serve(settings: ServerSettings, ready: Callable[[str, str], None]) -> None:
    """Runs until a signal, or, if so set, until the federation is finished. `ready` gets the address and the URL."""
    asked_to_stop = _signals()
    check_transport(settings)
    # Idle BLAS threads spin for a while after each call, on cores that serving needs; ours share the work instead.
    threadpool_limits(1, user_api="blas")
    store = open_store(settings)
    try:
        with store.explained():
            coordinator = Coordinator(store, settings)
            guarding = Guarding(coordinator, store, settings)
        server = _grpc_server(coordinator, store, guarding)
        address = guarding.bind(server, settings.listen)
        guarding.bind_enrolment()
        async with _monitored(coordinator, store, settings) as (monitoring, url):
            healthy = health.aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
            with store.explained():
                await coordinator.start()
                await monitoring.start()
            await server.start()
            await guarding.start()
            await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
            gc.freeze()  # what was made so far stays: the collector need not look at it again and again
            ready(address, url)
            try:
                await _until_over(coordinator, asked_to_stop)
            finally:
                await healthy.enter_graceful_shutdown()
                coordinator.let_go()
                await guarding.stop()
                await server.stop(GRACE_SECONDS)
                await coordinator.stop()
    finally:
        store.close()


@contextlib.asynccontextmanager
async def _monitored(
    coordinator: Coordinator, store: Store, settings: ServerSettings
) -> AsyncIterator[tuple[Monitoring, str]]:
    """Answers over HTTP from the first moment to the last, also while the coordinator starts and stops."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series per counter, which nothing here reads
    monitoring = Monitoring(coordinator, store)
    token, refusals = http_token(settings), coordinator.gate.refusals
    pages = with_token(monitoring.answer, token) if token else None
    pages = pages or with_hosts(monitoring.answer, settings.http.hosts.replace(",", " ").split(), refusals)
    endpoint = HttpEndpoint(settings.http.host, settings.http_port, pages, http_limits(settings.limits), refusals)
    endpoint.start()
    try:
        yield monitoring, endpoint.url
    finally:
        await monitoring.stop()
        await endpoint.stop()


def _grpc_server(coordinator: Coordinator, store: Store, guarding: Guarding) -> grpc.aio.Server:
    keep_log_short()
    options = (*SERVER_OPTIONS, *connection_limits(coordinator.settings.limits))
    server = grpc.aio.server(options=options, interceptors=guarding.interceptors)
    fleet = FleetService(coordinator)
    operator = OperatorService(coordinator, store, guarding.operators, guarding.enrolling)
    server.add_generic_rpc_handlers(
        (
            service_handler(FLEET, fleet, RAW_STREAMS, coordinator.gate, fleet.admit),
            service_handler(OPERATOR, operator, frozenset(), coordinator.gate),
            guarding.service,
        )
    )
    names = (FLEET.full_name, OPERATOR.full_name, ENROLMENT.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        asked_to_stop.set()
        for number in STOPPING:
            loop.remove_signal_handler(number)

    for number in STOPPING:
        loop.add_signal_handler(number, ask)
    return asked_to_stop


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """A disk that fails is not our bug: it is said plainly."""
    try:
        yield
    except (OSError, DBAPIError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.orig
        raise StateDirError(
            f"the state directory {folder} can no longer be written to: {reason}. Nothing that was acknowledged is "
            "lost. Make room or mend the disk, then start the server again: clients wait for it."
        ) from error


async def _until_over(coordinator: Coordinator, asked_to_stop: asyncio.Event) -> None:
    waits: list[asyncio.Future[Any]] = [asyncio.create_task(asked_to_stop.wait()), coordinator.failed]
    if coordinator.settings.exit_when_finished:
        waits.append(asyncio.create_task(coordinator.all_told.wait()))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if coordinator.failed.done():
        with _explained(coordinator.settings.state_dir):
            coordinator.failed.result()
    for wait in waits:
        wait.cancel()
