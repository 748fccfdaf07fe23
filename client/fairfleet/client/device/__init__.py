"""The device: conditions for training, priority, enrolment, certificates and replicas."""

from fairfleet.client.device.availability import Availability
from fairfleet.client.device.conditions import condition
from fairfleet.client.device.priority import give_way

__all__ = ["Availability", "condition", "give_way"]
