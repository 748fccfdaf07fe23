"""What survives a crash: the database, its queries and writes, and durable files.

`Store` is the entry: one state directory with its database. A query is a function of the store
(`client_queries`, `evaluation_queries`, `step_queries`), and a `Write` is carried out in a
transaction. `crash_points` lets tests kill the server after every durable write.
"""

from fairfleet.server.storage.files.history_files import DurableHistory
from fairfleet.server.storage.files.tensor_files import TensorFiles
from fairfleet.server.storage.queries import ReadableStore, WritableStore, Write
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.storage.schema import SCHEMA_VERSION
from fairfleet.server.storage.store import Fact, Store, StoredModel, StoredUpdate

__all__ = [
    "SCHEMA_VERSION",
    "DurableHistory",
    "Fact",
    "ReadableStore",
    "RoundRecord",
    "Store",
    "StoredModel",
    "StoredUpdate",
    "TensorFiles",
    "WritableStore",
    "Write",
]
