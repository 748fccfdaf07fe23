"""Builds, starts and stops the parts of a running federation.

`clients` answers clients, `operators` carries out what operators request, and `state` is a
read-only view for monitoring. All parts run on one event loop; what takes long (decoding,
aggregation, the disk) runs in threads.
"""

from __future__ import annotations

import logging

from sqlalchemy.exc import DBAPIError

from fairfleet.server.aggregation.report_requirements import ReportRequirements
from fairfleet.server.federation.clients.client_book import ClientBook
from fairfleet.server.federation.clients.client_requests import ClientRequests
from fairfleet.server.federation.clients.departures import Departures, FleetWatch
from fairfleet.server.federation.clients.sessions import SUPERSEDED_REMEMBERED, Sessions
from fairfleet.server.federation.federation_state import FederationState
from fairfleet.server.federation.kept_defaults import with_kept_defaults
from fairfleet.server.federation.operator_control import OperatorControl
from fairfleet.server.federation.operators.audit_log import AuditLog
from fairfleet.server.federation.operators.continuation import Continuation
from fairfleet.server.federation.operators.effective_settings import settings_digest
from fairfleet.server.federation.operators.settings_record import record_changed_settings
from fairfleet.server.federation.round_actions import RoundActions
from fairfleet.server.federation.round_commit import RoundCommits
from fairfleet.server.federation.round_opening import open_round
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.federation.update_receiver import UpdateReceiver
from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.security.caller import OpenCalls
from fairfleet.server.security.request_limits import RequestLimits
from fairfleet.server.settings import ServerSettings, plan_for_rule
from fairfleet.server.storage.client_queries import known_clients
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.codec_agreements import CodecAgreements, record_settings
from fairfleet.server.transfer.upload_registry import raw_bytes

log = logging.getLogger(__name__)


class Coordinator:
    """The running federation."""

    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self.settings, self.signature = settings, store.signature()
        self.settings_digest = settings_digest(settings)
        self.recipe = with_kept_defaults(store, settings.recipe())
        self.plan = plan_for_rule(settings.plan, self.recipe)
        self.loss_plan = settings.loss_plan
        self.report_requirements = ReportRequirements.of_recipe(
            self.recipe, settings.needed_measurement, settings.losses.rule
        )
        self.codec_policy = settings.codec_policy(raw_bytes(self.signature))
        self.codecs = self._codec_agreements(store)
        self.request_limits, self.calls = RequestLimits(settings.limits), OpenCalls()
        sessions = Sessions(settings.lease_seconds, settings.limits.clients, store.next_boot())
        self.runner = runner = RoundRunner(store, settings, self.recipe, sessions)
        self.events, self.failed, self.drained = (
            runner.events,
            runner.background.failed,
            runner.drained,
        )
        self.in_database = runner.executors.in_database
        self.audit = AuditLog(store, self.in_database)
        self.run_to_completion = runner.background.run_to_completion
        self._commits = RoundCommits(runner, settings)
        self._actions = RoundActions(runner, self._commits, settings, self.recipe)
        runner.perform = self._actions.perform
        departures = Departures(runner)
        self.update_receiver = UpdateReceiver(runner)
        self._book = ClientBook(
            store,
            runner.background,
            runner.executors,
            settings.limits.clients + SUPERSEDED_REMEMBERED,
        )
        self.clients = ClientRequests(
            runner, self._commits, departures, self.request_limits, self.calls, self._book
        )
        self.operators = OperatorControl(runner, departures, self.calls)
        self.state = FederationState(
            runner,
            self._commits,
            settings,
            self.recipe,
            self.update_receiver.traffic,
            self.request_limits,
            self._book,
        )
        self._watch = FleetWatch(
            runner, departures, settings.lease_seconds, settings.round.longest_wait_seconds
        )
        self.continuation = Continuation(
            runner, self._commits, settings, self.recipe, self._watch.begin_waiting
        )

    def _codec_agreements(self, store: Store) -> CodecAgreements:
        current = store.current_round()
        recorded = record_settings(store, self.codec_policy, current)
        # In a new federation no earlier run has given out tasks.
        started_in = -1 if current == Round(0) else current.number
        return CodecAgreements(self.codec_policy, recorded, started_in)

    async def start(self) -> None:
        """Resume the federation where the state directory left it."""
        runner = self.runner
        await runner.executors.in_database(record_changed_settings, runner.store, self.settings)
        clients = await runner.executors.in_database(known_clients, runner.store)
        self.request_limits.known.recall(clients)
        await self._book.open()
        updates, actions = await open_round(runner, self.settings, self.recipe)
        await self._commits.open(runner.round.number)
        await self.update_receiver.restore(updates)
        for action in actions:
            runner.perform(action, runner.round)
        runner.background.spawn(self._watch.run())

    def begin_shutdown(self) -> None:
        """Begin nothing new, and let waiting calls return: their clients try again later."""
        self.runner.stopping = True
        self.runner.assignments.wake_all()
        self.events.close()

    async def stop(self) -> None:
        """Finish what is being written. No call may be under way any more."""
        async with self.runner.lock:
            self.update_receiver.stop()
            self._actions.stop()
        await self.runner.background.end()
        try:
            await self._record_time()
        finally:
            self.runner.executors.shut_down()

    async def _record_time(self) -> None:
        """Record for how long the federation has run; a full disk must not hide why it stops."""
        clock = self.runner.clock.write()
        try:
            await self.runner.executors.in_database(self.runner.store.write, clock)
        except (OSError, DBAPIError) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            log.warning("the time since the last round is not counted: %s", reason)
