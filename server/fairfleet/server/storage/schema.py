"""The tables of a federation's database. `migrations` brings those of older versions up to date."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 9

metadata = sa.MetaData()
meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text)
)
models = sa.Table(
    "models",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("file", sa.Text),  # relative to the state directory; null once it was deleted
    sa.Column("rule_state", sa.Text),  # JSON: the state of rule and optimizer without vectors
    # The optimizer's vectors, relative to the state directory; null if there are none.
    sa.Column("vectors_file", sa.Text),
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
journal = sa.Table(
    "journal",
    metadata,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("round", sa.Integer, nullable=False, index=True),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
updates = sa.Table(
    "updates",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("codec", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.Integer, nullable=False),
    sa.Column("file", sa.Text),  # null once the round was committed: the model contains it
    sa.Column("report", sa.Text, nullable=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
    sa.Column("base", sa.Text),  # digest of the update that it is delta-coded against, or null
)
rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
    # The round that went back to an earlier version and so undid this one; null if it stands.
    sa.Column("undone_by", sa.Integer),
)
evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("evaluation", sa.Text),  # null if there is no result
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
trials = sa.Table(
    "trials",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("step", sa.Text, primary_key=True),  # digest of the step that was tried
    sa.Column("losses", sa.Text),  # the longest step first; null if the client could not
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
measures = sa.Table(
    "measures",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),  # of the step
    # Share of the clients whose loss did not rise; in rows without the next share, that share.
    sa.Column("improved", sa.Float, nullable=False),
    sa.Column("clients", sa.Integer, nullable=False),  # that reported losses before and after
    # Share of the clients whose loss fell; null in rows that an older server wrote.
    sa.Column("strictly_improved", sa.Float),
)
cut_off = sa.Table(
    "cut_off",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),  # that continued without the client
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("loss_before", sa.Float),  # in its newest report before; null if there is none
    sa.Column("round_before", sa.Integer),
    sa.Column("loss_after", sa.Float),  # in its next report; null while there is none
    sa.Column("round_after", sa.Integer),
    sa.Column("measurement_before", sa.Text),  # how loss_before was measured; null: exactly
    sa.Column("measurement_after", sa.Text),
    sa.Index("cut_off_by_client", "client", "loss_after"),
)
quarantine = sa.Table(
    "quarantine",
    metadata,
    sa.Column("round", sa.Integer, primary_key=True),  # that continued without the update
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.Integer, nullable=False),
    sa.Column("file", sa.Text),  # relative to the state directory; null if it is not kept
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
history = sa.Table(
    "history",
    metadata,
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("round", sa.Integer, nullable=False),  # of the model that the row was computed on
    sa.Column("digest", sa.Text, nullable=False),  # of the update
    sa.Column("loss", sa.Float, nullable=False),
    sa.Column("samples", sa.Float, nullable=False),
)
revocations = sa.Table(
    "revocations",
    metadata,
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text),
)
revoked_operators = sa.Table(
    "revoked_operators",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text),
)
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),  # of the secret, which is not stored
    sa.Column("expires_unix", sa.Float, nullable=False),
    sa.Column("certificate_seconds", sa.Float, nullable=False),  # validity of the certificate
    sa.Column("used_by", sa.Text),  # digest of the public key that it was used for; null if unused
)
clients = sa.Table(
    "clients",
    metadata,
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("software", sa.Text, nullable=False),  # as it said when it joined
    sa.Column("features", sa.Text, nullable=False),  # JSON list
    sa.Column("retired", sa.Text),  # why it takes part no more; null if it does
    sa.Column("unix_seconds", sa.Float, nullable=False),  # of the last change of this row
)
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
    sa.Column("operator", sa.Text, nullable=False),  # empty: the server, or without certificate
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("arguments", sa.Text, nullable=False),  # JSON object
    sa.Column("result", sa.Text, nullable=False),  # empty: done; otherwise why it was refused
)
settings_history = sa.Table(
    "settings_history",
    metadata,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("settings", sa.Text, nullable=False),  # JSON, without secrets
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
server_evaluations = sa.Table(
    "server_evaluations",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("evaluation", sa.Text),  # null if it failed
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("unix_seconds", sa.Float, nullable=False),
)
