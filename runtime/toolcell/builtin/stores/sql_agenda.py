"""Scheduled actions, their runs, and skills in a SQL database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from toolcell.builtin.stores.database import Database, Transaction, marks
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
from toolcell.builtin.stores.rules import check_description_query, check_run_end
from toolcell.builtin.stores.sql_documents import Dialect, check_dimensions, remember_dimensions
from toolcell.errors import UsageError
from toolcell.support.embeddings import nearest

ACTION_COLUMNS: Final = quoted(columns(ScheduledAction))
RUN_COLUMNS: Final = quoted(columns(ScheduledRun))


def _insert(table: str, record: Any) -> str:
    names = columns(type(record))
    return f"INSERT INTO {table} ({quoted(names)}) VALUES ({marks(len(names))}) ON CONFLICT DO NOTHING"


def _replace(table: str, record: Any) -> tuple[str, tuple[Any, ...]]:
    names = columns(type(record))
    changes = ", ".join(f'"{name}" = ?' for name in names)
    return f"UPDATE {table} SET {changes} WHERE id = ?", (*to_row(record), record.id)


def _create(transaction: Transaction, table: str, record: Any) -> None:
    if not transaction.run(_insert(table, record), to_row(record)):
        raise UsageError(f"the id {record.id!r} is taken; leave it out to get a new one")


class SqlSchedules:
    """The capability `ScheduleStore` over a database."""

    _database: Database
    _dialect: Dialect

    async def create_scheduled_action(self, action: ScheduledAction) -> None:
        """Store a new action."""
        await self._database.write(lambda transaction: _create(transaction, "scheduled_actions", action))

    async def list_scheduled_actions(self) -> list[ScheduledAction]:
        """Return all actions, the oldest first."""
        return await self._actions("", (), "created_at")

    async def get_due_scheduled_actions(self, now: int) -> list[ScheduledAction]:
        """Return the enabled actions whose `next_run` is not after `now`, the earliest first."""
        return await self._actions("WHERE enabled = 1 AND next_run <= ?", (now,), "next_run")

    async def _actions(self, condition: str, parameters: Sequence[Any], order: str) -> list[ScheduledAction]:
        sql = (
            f"SELECT {ACTION_COLUMNS} FROM scheduled_actions {condition}"
            f" ORDER BY {order}, id{self._dialect.text_collation}"
        )
        rows = await self._database.read(lambda transaction: transaction.rows(sql, parameters))
        return [from_row(ScheduledAction, row) for row in rows]

    async def update_scheduled_action(self, action: ScheduledAction) -> bool:
        """Replace the action of this id."""
        return await self._change(*_replace("scheduled_actions", action))

    async def delete_scheduled_action(self, action_id: str) -> bool:
        """Delete an action; its runs stay."""
        return await self._change("DELETE FROM scheduled_actions WHERE id = ?", (action_id,))

    async def delete_all_scheduled_actions(self) -> int:
        """Delete every action and return how many there were."""
        return await self._database.write(lambda transaction: transaction.run("DELETE FROM scheduled_actions"))

    async def find_scheduled_actions_by_description(self, substring: str) -> list[ScheduledAction]:
        """Return the actions whose description holds `substring`, whatever the case."""
        wanted = check_description_query(substring)  # databases fold only some letters, and LIKE has wildcards
        return [each for each in await self.list_scheduled_actions() if wanted in each.description.casefold()]

    async def reschedule(self, action_id: str, was: int, next_run: int, enabled: bool) -> bool:
        """Set `next_run` and `enabled` if `next_run` is still `was` and the action is enabled."""
        check_integer("next_run", next_run)
        sql = "UPDATE scheduled_actions SET next_run = ?, enabled = ? WHERE id = ? AND next_run = ? AND enabled = 1"
        return await self._change(sql, (next_run, int(enabled), action_id, was))

    async def begin_run(self, run: ScheduledRun) -> bool:
        """Record a run of an action and due time; False when there is one already."""

        def work(transaction: Transaction) -> bool:
            known = transaction.rows(
                "SELECT 1 FROM scheduled_runs WHERE action_id = ? AND due_at = ?", (run.action_id, run.due_at)
            )
            if not known:
                _create(transaction, "scheduled_runs", run)
            return not known

        return await self._database.write(work)

    async def extend_run(self, run_id: str, lease_until: int) -> bool:
        """Move the end of a running run's lease."""
        check_integer("lease_until", lease_until)
        sql = "UPDATE scheduled_runs SET lease_until = ? WHERE id = ? AND status = 'running'"
        return await self._change(sql, (lease_until, run_id))

    async def end_run(self, run_id: str, status: RunStatus, ended_at: int, detail: str = "") -> bool:
        """Record how a running run ended."""
        check_run_end(status)
        check_integer("ended_at", ended_at)
        check_text("detail", detail)
        sql = "UPDATE scheduled_runs SET status = ?, ended_at = ?, detail = ? WHERE id = ? AND status = 'running'"
        return await self._change(sql, (status, ended_at, detail, run_id))

    async def expire_runs(self, now: int) -> list[ScheduledRun]:
        """Mark running runs whose lease ended before `now` as in doubt, and return them."""
        sql = (
            "UPDATE scheduled_runs SET status = 'in_doubt', ended_at = ? WHERE status = 'running' AND lease_until < ?"
            f" RETURNING {RUN_COLUMNS}"
        )
        rows = await self._database.write(lambda transaction: transaction.rows(sql, (now, now)))
        return [from_row(ScheduledRun, row) for row in rows]

    async def list_runs(self, action_id: str = "", status: str = "", limit: int = 100) -> list[ScheduledRun]:
        """Return runs, the latest due time first."""
        wanted = [(name, value) for name, value in (("action_id", action_id), ("status", status)) if value]
        condition = " AND ".join(f"{name} = ?" for name, _ in wanted) or "1 = 1"
        sql = (
            f"SELECT {RUN_COLUMNS} FROM scheduled_runs WHERE {condition}"
            f" ORDER BY due_at DESC, id{self._dialect.text_collation} DESC LIMIT ?"
        )
        values = (*(value for _, value in wanted), limit)
        rows = await self._database.read(lambda transaction: transaction.rows(sql, values))
        return [from_row(ScheduledRun, row) for row in rows]

    async def _change(self, sql: str, parameters: Sequence[Any]) -> bool:
        return bool(await self._database.write(lambda transaction: transaction.run(sql, parameters)))


class SqlSkills:
    """The capability `SkillStore` over a database. Skills are few: a search compares them all."""

    _database: Database
    _dialect: Dialect

    async def create_skill(self, skill: Skill) -> None:
        """Store a new skill."""

        def work(transaction: Transaction) -> None:
            remember_dimensions(transaction, [skill.embedding])
            _create(transaction, "skills", skill)

        await self._database.write(work)

    async def get_skill(self, skill_id: str) -> Skill | None:
        """Return the skill, or None."""
        found = await self._skills("WHERE id = ?", (skill_id,))
        return found[0] if found else None

    async def list_skills(self) -> list[Skill]:
        """Return all skills in the order of their ids."""
        return await self._skills("", ())

    async def _skills(self, condition: str, parameters: Sequence[Any]) -> list[Skill]:
        return await self._database.read(lambda transaction: self._read(transaction, condition, parameters))

    def _read(self, transaction: Transaction, condition: str, parameters: Sequence[Any]) -> list[Skill]:
        sql = f"SELECT {quoted(columns(Skill))} FROM skills {condition} ORDER BY id{self._dialect.text_collation}"
        return [from_row(Skill, row) for row in transaction.rows(sql, parameters)]

    async def update_skill(self, skill: Skill) -> bool:
        """Replace the skill of this id."""

        def work(transaction: Transaction) -> bool:
            remember_dimensions(transaction, [skill.embedding])
            return bool(transaction.run(*_replace("skills", skill)))

        return await self._database.write(work)

    async def delete_skill(self, skill_id: str) -> bool:
        """Delete a skill."""
        sql = "DELETE FROM skills WHERE id = ?"
        return bool(await self._database.write(lambda transaction: transaction.run(sql, (skill_id,))))

    async def search_skills(self, embedding: Vector, top_k: int) -> list[Scored[Skill]]:
        """Return the skills whose vectors are nearest."""
        check_top_k(top_k)

        def work(transaction: Transaction) -> list[Scored[Skill]]:
            check_dimensions(transaction, [embedding])
            skills = self._read(transaction, "WHERE embedding IS NOT NULL", ())
            found = nearest(embedding, (each.embedding or () for each in skills))
            return [Scored(skills[at], score) for at, score in found[:top_k]]

        return await self._database.read(work)
