"""The server process: opens the state directory, serves gRPC and HTTP, and stops on a signal.

It connects the packages; every decision is made in one of them.
"""

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
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from threadpoolctl import threadpool_limits

from fairfleet.common.errors import StateDirError, UsageError
from fairfleet.common.net.channel_options import SERVER_OPTIONS
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2, operator_pb2
from fairfleet.server.evaluation.evaluator import ServerEvaluator
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.monitoring.http_endpoint import HttpEndpoint, HttpLimits
from fairfleet.server.monitoring.http_hosts import with_hosts
from fairfleet.server.monitoring.http_token import read_token, with_token
from fairfleet.server.monitoring.monitor import Monitor
from fairfleet.server.rpc.channel_options import connection_limits, keep_log_short
from fairfleet.server.rpc.endpoints import ENROLMENT, Endpoints, check_transport
from fairfleet.server.rpc.fleet_service import RAW_STREAMS, FleetService
from fairfleet.server.rpc.free_ports import check_ports
from fairfleet.server.rpc.handlers import service_handler
from fairfleet.server.rpc.operator_service import OperatorService
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.downlink import DOWNLINK, Downlink
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["Operator"]
GRACE_SECONDS = 3.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def open_store(settings: ServerSettings) -> Store:
    """Open the state directory; create a federation with the given model if it has none.

    Raises UsageError if the model is missing, too large, or differs from the federation's.
    """
    _require_model_or_federation(settings)
    model = _initial_model(settings)  # a file that cannot be read leaves no empty directory
    store = Store(settings.state_dir, settings.database, schema=settings.database_schema)
    try:
        with store.explained():
            _create_or_check_federation(store, settings, model)
    except BaseException:
        store.close()
        raise
    return store


def _require_model_or_federation(settings: ServerSettings) -> None:
    """Raise UsageError for a new directory without a model, before the directory is made."""
    if not settings.model and not settings.database and _is_to_be_made(settings.state_dir):
        raise _no_model(settings)


def _is_to_be_made(folder: Path) -> bool:
    """Return whether a folder does not exist, but can: what is above it is a folder."""
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    return above.is_dir() and not folder.exists()


def _no_model(settings: ServerSettings) -> UsageError:
    return UsageError(
        f"{settings.state_dir} holds no federation yet, and no initial model was given. "
        "Make one with `fairfleet init --task module:name --output model.safetensors` and "
        "start the server with --model model.safetensors."
    )


def _initial_model(settings: ServerSettings) -> Model | None:
    if settings.model is None:
        return None
    _check_size(settings.model, settings.limits.model_bytes)
    model, _ = Model.load(settings.model)
    return model


def _create_or_check_federation(
    store: Store, settings: ServerSettings, model: Model | None
) -> None:
    if model is None:
        if not store.has_federation:
            raise _no_model(settings)
        return
    if store.has_federation:
        difference = store.signature().difference(model.signature)
        if difference:
            raise UsageError(
                f"{settings.state_dir} holds a federation of another model than "
                f"{settings.model}: {difference}. "
                "Omit --model to continue with it, or give a new --state-dir."
            )
        log.info("continuing the federation in %s; the given model is not used", settings.state_dir)
        return
    rounding_error = Downlink(model=settings.compression.model).rounded(model)
    vectors = {} if rounding_error is None else {DOWNLINK: rounding_error}
    store.create(settings.name, model, PublishedModel.of(0, model).digest, vectors)


def _check_size(model: Path, limit_bytes: int) -> None:
    """Raise UsageError for a model file above the limit, before it is read.

    Every update in a round's memory is as large as the model.
    """
    size = model.stat().st_size if model.exists() else 0  # reading reports a missing file
    if size > limit_bytes:
        raise UsageError(
            f"{model} has {size} bytes; this server accepts models of at most {limit_bytes}. "
            "Raise limits.model_bytes to use it."
        )


async def serve(settings: ServerSettings, ready: Callable[[str, str], None]) -> None:
    """Serve until a signal, or until the federation is finished if `exit_when_finished` is set.

    `ready` is called with the gRPC address and the HTTP URL once clients can connect.
    """
    stop_requested = _signals()
    check_transport(settings)
    token = read_token(settings)
    check_ports(settings)
    # Idle BLAS threads spin after each call, on cores that serving needs. The gram engine splits
    # the work over its own threads instead.
    threadpool_limits(1, user_api="blas")
    store, evaluator = open_store(settings), None
    try:
        with store.explained():
            coordinator = Coordinator(store, settings)
            endpoints = Endpoints(coordinator, store, settings)
            evaluator = _evaluator(coordinator, store)
        if evaluator and not await _started(evaluator, stop_requested):
            return
        server = grpc_server(coordinator, store, endpoints, FleetService(coordinator))
        address = endpoints.bind(server, settings.listen)
        endpoints.bind_enrolment()
        async with _monitored(coordinator, store, token) as (monitor, url):
            healthy = health.aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
            with store.explained():
                await coordinator.start()
                await monitor.start()
            await server.start()
            await endpoints.start()
            await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
            gc.freeze()  # the objects so far are permanent; the collector can skip them
            if evaluator:
                evaluator.follow()
            ready(address, url)
            try:
                await _until_over(coordinator, evaluator, stop_requested)
            finally:
                await healthy.enter_graceful_shutdown()
                coordinator.begin_shutdown()
                await endpoints.stop()
                await server.stop(GRACE_SECONDS)
                if evaluator:
                    await evaluator.stop()
                await coordinator.stop()
    finally:
        if evaluator:
            await evaluator.stop()
        store.close()


@contextlib.asynccontextmanager
async def _monitored(
    coordinator: Coordinator, store: Store, token: str | None
) -> AsyncIterator[tuple[Monitor, str]]:
    """Answer HTTP requests, also while the coordinator starts and stops."""
    # Without this, each counter has one more series, which nothing reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    monitor = Monitor(coordinator.state, store)
    settings, refusals = coordinator.settings, coordinator.request_limits.refusals
    pages = with_token(monitor.answer, token) if token else None
    pages = pages or with_hosts(
        monitor.answer, settings.http.hosts.replace(",", " ").split(), refusals
    )
    endpoint = HttpEndpoint(
        settings.http.host, settings.http_port, pages, HttpLimits.of(settings.limits), refusals
    )
    endpoint.start()
    try:
        yield monitor, endpoint.url
    finally:
        await monitor.stop()
        await endpoint.stop()


def grpc_server(
    coordinator: Coordinator, store: Store, endpoints: Endpoints, fleet: FleetService
) -> grpc.aio.Server:
    """Return a server with all services, which is not bound to an address yet."""
    keep_log_short()
    options = (*SERVER_OPTIONS, *connection_limits(coordinator.settings.limits))
    server = grpc.aio.server(options=options, interceptors=endpoints.interceptors)
    operator = OperatorService(
        coordinator, store, endpoints.operators, endpoints.enrolment_authority
    )
    server.add_generic_rpc_handlers(
        (
            service_handler(FLEET, fleet, RAW_STREAMS, coordinator.request_limits, fleet.admit),
            service_handler(OPERATOR, operator, frozenset(), coordinator.request_limits),
            endpoints.service,
        )
    )
    names = (
        FLEET.full_name,
        OPERATOR.full_name,
        ENROLMENT.full_name,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    return server


def _signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal ends the process."""
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        stop_requested.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, request_stop)
    return stop_requested


@contextlib.contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk or database into a StateDirError that says what to do."""
    try:
        yield
    except (DataError, IntegrityError, ProgrammingError):
        raise  # a bug in our statements, not a fault of the disk
    except (OSError, DBAPIError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.orig
        raise StateDirError(
            f"the state directory {folder} can no longer be written to: {reason}. No acknowledged "
            "data is lost. Free space or repair the disk, then restart the server: clients wait "
            "for it."
        ) from error


def _evaluator(coordinator: Coordinator, store: Store) -> ServerEvaluator | None:
    settings = coordinator.settings
    if settings.evaluation is None:
        return None
    every = settings.evaluation.every or settings.round.evaluate_every
    return ServerEvaluator(coordinator, store, settings.evaluation, every)


async def _started(evaluator: ServerEvaluator, stop_requested: asyncio.Event) -> bool:
    """Start the worker; return whether it is ready. Its test data may take long to load."""
    waits = {
        starting := asyncio.create_task(evaluator.start()),
        stopping := asyncio.create_task(stop_requested.wait()),
    }
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    is_ready = starting.done()
    for wait in waits:
        wait.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await starting  # raises what is wrong with the task
    return is_ready


async def _drained(coordinator: Coordinator, evaluator: ServerEvaluator | None) -> None:
    """Wait until every client knows that training is finished, and the last version's figures."""
    while True:
        await coordinator.drained.wait()
        if evaluator:
            await evaluator.finish()
        if coordinator.drained.is_set():
            return  # otherwise an operator let the federation go on meanwhile


async def _until_over(
    coordinator: Coordinator, evaluator: ServerEvaluator | None, stop_requested: asyncio.Event
) -> None:
    waits: list[asyncio.Future[Any]] = [
        asyncio.create_task(stop_requested.wait()),
        coordinator.failed,
    ]
    if coordinator.settings.exit_when_finished:
        waits.append(asyncio.create_task(_drained(coordinator, evaluator)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if coordinator.failed.done():
        with explain_disk_errors(coordinator.settings.state_dir):
            coordinator.failed.result()
    for wait in waits:
        wait.cancel()
