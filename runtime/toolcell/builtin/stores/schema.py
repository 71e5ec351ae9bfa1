"""Tables of the stores in SQL, and how an older store becomes a newer one.

A migration never changes once it is released. `{seq}`, `{blob}` and `{integer}` differ between databases.
"""

from __future__ import annotations

from typing import Final

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE documents (id TEXT PRIMARY KEY, title TEXT NOT NULL, source TEXT NOT NULL, content TEXT NOT NULL,"
        " created_at {integer} NOT NULL, digest TEXT NOT NULL UNIQUE)",
        "CREATE TABLE chunks (seq {seq}, id TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL REFERENCES documents (id)"
        " ON DELETE CASCADE, parent_id TEXT NOT NULL, content TEXT NOT NULL, chunk_index {integer} NOT NULL,"
        " metadata TEXT NOT NULL, is_parent {integer} NOT NULL, embedding {blob})",
        "CREATE INDEX chunks_document ON chunks (document_id)",
        "CREATE TABLE messages (seq {seq}, id TEXT NOT NULL UNIQUE, thread_id TEXT NOT NULL, role TEXT NOT NULL,"
        " content TEXT NOT NULL, metadata TEXT NOT NULL, created_at {integer} NOT NULL, embedding {blob})",
        "CREATE INDEX messages_thread ON messages (thread_id, created_at, id)",
        "CREATE TABLE scheduled_actions (id TEXT PRIMARY KEY, description TEXT NOT NULL, schedule TEXT NOT NULL,"
        " tool_calls TEXT NOT NULL, synthesis_prompt TEXT NOT NULL, next_run {integer} NOT NULL,"
        " enabled {integer} NOT NULL, skill_id TEXT NOT NULL, created_at {integer} NOT NULL)",
        "CREATE INDEX scheduled_actions_due ON scheduled_actions (next_run) WHERE enabled = 1",
        "CREATE TABLE scheduled_runs (id TEXT PRIMARY KEY, action_id TEXT NOT NULL, due_at {integer} NOT NULL,"
        " owner TEXT NOT NULL, lease_until {integer} NOT NULL, status TEXT NOT NULL, started_at {integer} NOT NULL,"
        " ended_at {integer} NOT NULL, detail TEXT NOT NULL, UNIQUE (action_id, due_at))",
        "CREATE INDEX scheduled_runs_status ON scheduled_runs (status, lease_until)",
        "CREATE TABLE skills (id TEXT PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL,"
        " instructions TEXT NOT NULL, tools TEXT NOT NULL, model TEXT NOT NULL, tags TEXT NOT NULL,"
        ' created_by TEXT NOT NULL, "references" TEXT NOT NULL, embedding {blob}, created_at {integer} NOT NULL,'
        " updated_at {integer} NOT NULL)",
    ),
)

VERSION: Final = len(MIGRATIONS)
