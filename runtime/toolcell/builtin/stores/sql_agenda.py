"""Scheduled actions, their runs, and skills in a SQL database; and `SqlStore`, which has every capability.

The methods' rules are those of `protocols`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from toolcell.builtin.stores.database import Database, Transaction, marks
from toolcell.builtin.stores.protocols import ScheduleStore, SkillStore
from toolcell.builtin.stores.records import (
    RunStatus,
    ScheduledAction,
    ScheduledRun,
    Scored,
    Skill,
    Vector,
    check_integer,
    check_text,
    check_top_k,
)
from toolcell.builtin.stores.rows import columns, from_row, quoted, to_row
from toolcell.builtin.stores.sql_documents import Dialect, SqlDocuments, SqlPart, check_dimensions, remember_dimensions
from toolcell.errors import UsageError
from toolcell.support.checks import check_one_of
from toolcell.support.embeddings import nearest

ACTION_COLUMNS: Final = quoted(columns(ScheduledAction))
RUN_COLUMNS: Final = quoted(columns(ScheduledRun))


def _replace(table: str, record: Any) -> tuple[str, tuple[Any, ...]]:
    names = columns(type(record))
    changes = ", ".join(f'"{name}" = ?' for name in names)
    return f"UPDATE {table} SET {changes} WHERE id = ?", (*to_row(record), record.id)


def _create(transaction: Transaction, table: str, record: Any) -> None:
    names = columns(type(record))
    sql = f"INSERT INTO {table} ({quoted(names)}) VALUES ({marks(len(names))}) ON CONFLICT DO NOTHING"
    if not transaction.run(sql, to_row(record)):
        raise UsageError(f"the id {record.id!r} is taken; leave it out to get a new one")


class SqlSchedules(SqlPart, ScheduleStore):
    """The capability `ScheduleStore` over a database."""

    async def create_scheduled_action(self, action: ScheduledAction) -> None:
        await self._database.write(lambda transaction: _create(transaction, "scheduled_actions", action))

    async def list_scheduled_actions(self) -> list[ScheduledAction]:
        return await self._actions("", (), "created_at")

    async def get_due_scheduled_actions(self, now: int) -> list[ScheduledAction]:
        return await self._actions("WHERE enabled = 1 AND next_run <= ?", (now,), "next_run")

    async def _actions(self, condition: str, parameters: Sequence[Any], order: str) -> list[ScheduledAction]:
        sql = (
            f"SELECT {ACTION_COLUMNS} FROM scheduled_actions {condition}"
            f" ORDER BY {order}, id{self._dialect.text_collation}"
        )
        return await self._records(ScheduledAction, sql, parameters)

    async def update_scheduled_action(self, action: ScheduledAction) -> bool:
        return await self._change(*_replace("scheduled_actions", action))

    async def delete_scheduled_action(self, action_id: str) -> bool:
        return await self._change("DELETE FROM scheduled_actions WHERE id = ?", (action_id,))

    async def delete_all_scheduled_actions(self) -> int:
        return await self._database.write(lambda transaction: transaction.run("DELETE FROM scheduled_actions"))

    async def find_scheduled_actions_by_description(self, substring: str) -> list[ScheduledAction]:
        check_text("description_query", substring)
        if not substring.strip():
            raise UsageError(
                "description_query is empty, which would match every action; give a part of the description"
            )
        wanted = substring.casefold()  # databases fold only some letters, and LIKE has wildcards
        return [each for each in await self.list_scheduled_actions() if wanted in each.description.casefold()]

    async def reschedule(self, action_id: str, was: int, next_run: int, enabled: bool) -> bool:
        check_integer("next_run", next_run)
        sql = "UPDATE scheduled_actions SET next_run = ?, enabled = ? WHERE id = ? AND next_run = ? AND enabled = 1"
        return await self._change(sql, (next_run, int(enabled), action_id, was))

    async def begin_run(self, run: ScheduledRun) -> bool:
        def work(transaction: Transaction) -> bool:
            known = transaction.rows(
                "SELECT 1 FROM scheduled_runs WHERE action_id = ? AND due_at = ?", (run.action_id, run.due_at)
            )
            if not known:
                _create(transaction, "scheduled_runs", run)
            return not known

        return await self._database.write(work)

    async def extend_run(self, run_id: str, lease_until: int) -> bool:
        check_integer("lease_until", lease_until)
        sql = "UPDATE scheduled_runs SET lease_until = ? WHERE id = ? AND status = 'running'"
        return await self._change(sql, (lease_until, run_id))

    async def end_run(self, run_id: str, status: RunStatus, ended_at: int, detail: str = "") -> bool:
        check_one_of("status", status, ("done", "failed", "missed", "in_doubt"))
        check_integer("ended_at", ended_at)
        check_text("detail", detail)
        sql = "UPDATE scheduled_runs SET status = ?, ended_at = ?, detail = ? WHERE id = ? AND status = 'running'"
        return await self._change(sql, (status, ended_at, detail, run_id))

    async def expire_runs(self, now: int) -> list[ScheduledRun]:
        sql = (
            "UPDATE scheduled_runs SET status = 'in_doubt', ended_at = ? WHERE status = 'running' AND lease_until < ?"
            f" RETURNING {RUN_COLUMNS}"
        )
        rows = await self._database.write(lambda transaction: transaction.rows(sql, (now, now)))
        return [from_row(ScheduledRun, row) for row in rows]

    async def list_runs(self, action_id: str = "", status: str = "", limit: int = 100) -> list[ScheduledRun]:
        wanted = [(name, value) for name, value in (("action_id", action_id), ("status", status)) if value]
        condition = " AND ".join(f"{name} = ?" for name, _ in wanted) or "1 = 1"
        sql = (
            f"SELECT {RUN_COLUMNS} FROM scheduled_runs WHERE {condition}"
            f" ORDER BY due_at DESC, id{self._dialect.text_collation} DESC LIMIT ?"
        )
        return await self._records(ScheduledRun, sql, (*(value for _, value in wanted), limit))


class SqlSkills(SqlPart, SkillStore):
    """The capability `SkillStore` over a database. Skills are few: a search compares them all."""

    async def create_skill(self, skill: Skill) -> None:
        def work(transaction: Transaction) -> None:
            remember_dimensions(transaction, [skill.embedding])
            _create(transaction, "skills", skill)

        await self._database.write(work)

    async def get_skill(self, skill_id: str) -> Skill | None:
        return next(iter(await self._skills("WHERE id = ?", (skill_id,))), None)

    async def list_skills(self) -> list[Skill]:
        return await self._skills("", ())

    async def _skills(self, condition: str, parameters: Sequence[Any]) -> list[Skill]:
        return await self._database.read(lambda transaction: self._read(transaction, condition, parameters))

    def _read(self, transaction: Transaction, condition: str, parameters: Sequence[Any]) -> list[Skill]:
        sql = f"SELECT {quoted(columns(Skill))} FROM skills {condition} ORDER BY id{self._dialect.text_collation}"
        return [from_row(Skill, row) for row in transaction.rows(sql, parameters)]

    async def update_skill(self, skill: Skill) -> bool:
        def work(transaction: Transaction) -> bool:
            remember_dimensions(transaction, [skill.embedding])
            return bool(transaction.run(*_replace("skills", skill)))

        return await self._database.write(work)

    async def delete_skill(self, skill_id: str) -> bool:
        return await self._change("DELETE FROM skills WHERE id = ?", (skill_id,))

    async def search_skills(self, embedding: Vector, top_k: int) -> list[Scored[Skill]]:
        check_top_k(top_k)

        def work(transaction: Transaction) -> list[Scored[Skill]]:
            check_dimensions(transaction, [embedding])
            skills = self._read(transaction, "WHERE embedding IS NOT NULL", ())
            found = nearest(embedding, (each.embedding or () for each in skills))
            return [Scored(skills[at], score) for at, score in found[:top_k]]

        return await self._database.read(work)


class SqlStore(SqlDocuments, SqlSchedules, SqlSkills):
    """A store with every capability over one database."""

    def __init__(self, database: Database, dialect: Dialect) -> None:
        self._database, self._dialect = database, dialect
        self._forget_vectors()

    async def init(self) -> None:
        await self._database.read(lambda _: None)

    async def close(self) -> None:
        await self._database.close()
        self._forget_vectors()
