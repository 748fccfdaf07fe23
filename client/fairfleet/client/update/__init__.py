"""The encoded update on disk, with error feedback and prediction from earlier updates."""

from fairfleet.client.update.error_feedback import StoredResidual
from fairfleet.client.update.prediction_base import LastUpdate
from fairfleet.client.update.spool import Spool, SpooledUpdate

__all__ = ["LastUpdate", "Spool", "SpooledUpdate", "StoredResidual"]
