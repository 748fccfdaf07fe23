"""What has left this machine: a durable ledger of releases, and the owner's limit on epsilon."""

from fairfleet.client.privacy.allowance import Allowance, PrivacyBudgetSpent
from fairfleet.client.privacy.ledger import LedgerEntry, LedgerUnusable, ReleaseLedger

__all__ = ["Allowance", "LedgerEntry", "LedgerUnusable", "PrivacyBudgetSpent", "ReleaseLedger"]
