"""Updates in and models out: uploads, downlink, the choice of codecs."""

from fairfleet.server.transfer.codec_agreements import CodecAgreements
from fairfleet.server.transfer.codec_selection import CodecPolicy, Uplinks
from fairfleet.server.transfer.counters import TrafficCounters
from fairfleet.server.transfer.downlink import Downlink
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload
from fairfleet.server.transfer.upload_registry import UploadRegistry

__all__ = [
    "AnnouncedUpdate",
    "CodecAgreements",
    "CodecPolicy",
    "Downlink",
    "PublishedModel",
    "TrafficCounters",
    "Uplinks",
    "Upload",
    "UploadRegistry",
]
