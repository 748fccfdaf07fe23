"""Differential privacy on the server: settings, accountant, budget."""

from fairfleet.server.privacy.accountant import PrivacySpent, SampledRelease
from fairfleet.server.privacy.settings import PrivacySettings, ServerNoise

__all__ = ["PrivacySettings", "PrivacySpent", "SampledRelease", "ServerNoise"]
