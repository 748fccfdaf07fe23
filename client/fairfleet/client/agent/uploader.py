"""Uploads of spooled updates, until the server has answered each with a receipt.

An upload survives broken connections and restarts of either side: it continues where the server
says. The privacy that was applied to an update is checked before the server learns of the update.
"""

from __future__ import annotations

import logging
from typing import Any

from fairfleet.client.agent.call_errors import FederationChanged, JoinRefused
from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.introduction import federation_key
from fairfleet.client.agent.model_cache import DAMAGED_TRANSFERS
from fairfleet.client.agent.pauses import pauses
from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.privacy import Allowance, LedgerUnusable, PrivacyBudgetSpent
from fairfleet.client.update.spool import Spool, SpooledUpdate
from fairfleet.common import wire
from fairfleet.common.cli.log_format import EVENTS
from fairfleet.common.cli.message_json import word
from fairfleet.common.errors import (
    AnotherUpdateCounts,
    BadRequest,
    ContestedIdentity,
    Corrupted,
    FleetError,
    NotAllowed,
    OutOfOrder,
    Refused,
    Superseded,
)
from fairfleet.common.names import round_name
from fairfleet.common.privacy import PrivacyTerms, shortfall
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)
events = logging.getLogger(EVENTS)

# These end the client, or its work for the present federation; the update stays in its spool.
FINAL = (
    Superseded,
    ContestedIdentity,
    NotAllowed,
    JoinRefused,
    FederationChanged,
    PrivacyBudgetSpent,
    LedgerUnusable,
)


class UnusableUpdate(FleetError):
    """The server does not accept this update, and sending it again would not help."""


class UpdateUploader:
    """Sends the update in the spool and settles it by its receipt."""

    def __init__(
        self,
        connection: ServerConnection,
        spool: Spool,
        counters: ClientCounters,
        allowance: Allowance,
        least_noise: float = 0.0,
    ) -> None:
        """Nothing is announced before `allowance` has recorded it."""
        self._connection, self._spool, self._counters = connection, spool, counters
        self._allowance, self._least_noise = allowance, least_noise

    def upload(self, spooled: SpooledUpdate, *, begun: bool) -> None:
        """Send the update and settle it; `begun` means that the server may have a part of it.

        Raises UnusableUpdate if the server does not accept it.
        """
        try:
            receipt = self._deliver(spooled, begun=begun)
        except BadRequest as error:
            raise UnusableUpdate(str(error)) from error
        except AnotherUpdateCounts as error:
            # An earlier run of this client sent one. It stands, and the round is done.
            self._discard(spooled, error)
            return
        counted = _counts(receipt, spooled)
        self._spool.settle(spooled, counted=counted, for_good=receipt.durable)
        if counted:
            about = {"event": "update_sent", "round": spooled.round}
            size, loss = f"{spooled.size_bytes:,}", spooled.report.loss_before
            text = "%s: update of %s bytes sent; training loss before it %.3f"
            events.info(text, round_name(spooled.round), size, loss, extra=about)

    def send_unsent(self) -> None:
        """Send the update that an earlier run of this client left, if there is one.

        Its round may be over, but the history may still use it.
        """
        federation = self._connection.joined.federation
        spooled = self._spool.find_unsent(federation)
        if spooled is None:
            return
        if self._lacks_privacy(spooled, wire.privacy_in(self._connection.joined.privacy)):
            return
        try:
            self.upload(spooled, begun=True)
        except FINAL:
            raise
        except (Refused, UnusableUpdate) as error:
            self._discard(spooled, error)

    def settle(self, federation: str, terms: PrivacyTerms) -> None:
        """Find out whether an earlier update counted, before another one takes its place.

        Its receipt may have never arrived, or was not for good.
        """
        spooled = self._spool.unsettled(federation)
        if spooled is None:
            return
        if self._lacks_privacy(spooled, terms):
            self._spool.settle(spooled, counted=False)
            return
        try:
            opened = self._connection.open_upload(**self._announcement(spooled))
            receipt = opened.receipt  # an empty one means that the update may be sent
            if not opened.HasField("receipt") and self._spool.find_unsent(federation):
                receipt = self._deliver(spooled, begun=True)
            self._spool.settle(spooled, counted=_counts(receipt, spooled))
        except FINAL:
            raise
        except Refused as error:
            self._discard(spooled, error)

    def _lacks_privacy(self, spooled: SpooledUpdate, terms: PrivacyTerms) -> bool:
        """Return whether the update has less privacy than this client or the server now requires.

        Such an update is not even announced, because the announcement contains its report.
        """
        noise_multiplier = spooled.terms.noise_multiplier
        return (
            noise_multiplier < self._least_noise
            or (self._allowance.max_epsilon is not None and not noise_multiplier)
            or shortfall(spooled.terms, terms) is not None
        )

    def _discard(self, spooled: SpooledUpdate, error: FleetError) -> None:
        log.info(
            "the update for %s did not count: %s",
            round_name(spooled.round),
            error,
            extra={"round": spooled.round},
        )
        self._spool.settle(spooled, counted=False)

    def _deliver(self, spooled: SpooledUpdate, *, begun: bool) -> pb.Receipt:
        """Send what the server does not have yet, until there is a receipt.

        Raises UnusableUpdate if somebody deletes the update meanwhile.
        """
        damaged = 0
        for pause in pauses():
            try:
                receipt = self._send_rest(spooled) if begun else self._send_all(spooled)
            except (Corrupted, OutOfOrder):
                damaged += 1
                if damaged == DAMAGED_TRANSFERS:
                    raise
                receipt = None
            if receipt is not None:
                self._record_receipt(spooled, receipt)
                return receipt
            if not self._spool.has_chunks:
                raise UnusableUpdate("its file on this disk was deleted")
            begun = True
            self._connection.wait(pause)
        raise AssertionError("pauses never end")  # pragma: no cover

    def _send_all(self, spooled: SpooledUpdate) -> pb.Receipt | None:
        messages = self._spool.messages_from(0)
        return self._connection.open_and_send(messages, **self._announcement(spooled))

    def _send_rest(self, spooled: SpooledUpdate) -> pb.Receipt | None:
        opened = self._connection.open_upload(**self._announcement(spooled))
        if opened.HasField("receipt"):
            return opened.receipt
        return self._connection.send(opened.upload, self._spool.messages_from(opened.offset_bytes))

    def _announcement(self, spooled: SpooledUpdate) -> dict[str, Any]:
        """Charge the update, once, and return the fields of its OpenUploadRequest.

        Raises PrivacyBudgetSpent if it must not be sent.
        """
        self._allowance.charge_update(
            federation_key(self._connection.joined),
            spooled.round,
            spooled.digest,
            spooled.terms,
            spooled.report,
        )
        return _announcement(spooled)

    def _record_receipt(self, spooled: SpooledUpdate, receipt: pb.Receipt) -> None:
        self._counters.updates[word(pb.Outcome.DESCRIPTOR, receipt.outcome)] += 1
        if receipt.outcome != pb.OUTCOME_COUNTED:
            log.info(
                "the update for round %d does not count: %s",
                spooled.round,
                receipt.reason,
                extra={"round": spooled.round},
            )


def _announcement(spooled: SpooledUpdate) -> dict[str, Any]:
    """Return the fields of an OpenUploadRequest for the update."""
    return {
        "round": spooled.round,
        "model_digest": bytes.fromhex(spooled.model_digest),
        "codec": spooled.codec,
        "size_bytes": spooled.size_bytes,
        "digest": bytes.fromhex(spooled.digest),
        "report": wire.report_out(spooled.report),
        "privacy": wire.privacy_out(spooled.terms),
        "base": bytes.fromhex(spooled.base),
    }


def _counts(receipt: pb.Receipt, spooled: SpooledUpdate) -> bool:
    """Return whether exactly this update counts.

    The receipt may be for another update that this client made for the round.
    """
    return receipt.outcome == pb.OUTCOME_COUNTED and receipt.digest.hex() == spooled.digest


def can_be_sent(spooled: SpooledUpdate, request: pb.TrainTask, terms: PrivacyTerms) -> bool:
    """Return whether an update of an earlier run still satisfies the request.

    The server must have its base, its report must have the requested loss on the initial model, and
    its privacy must be at least what is requested now.
    """
    readable_bases = {"", request.prediction.base.hex()}
    is_complete = not request.HasField("initial_model") or spooled.report.initial_loss is not None
    return is_complete and spooled.base in readable_bases and not shortfall(spooled.terms, terms)
