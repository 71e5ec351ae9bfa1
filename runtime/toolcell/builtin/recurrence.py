"""When a scheduled action is due: its schedule as text, and the next time after a moment. Pure; the clock is given.

Dates come from `dateutil.rrule`, offsets from `zoneinfo`. Around a change of the clocks the rules are those of RFC
5545, section 3.3.5: a local time that does not exist (spring) is read with the offset from before the change, so the
action is due later by the length of the gap; of a local time that exists twice (autumn) only the first one counts.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from datetime import time as clock_time
from typing import Literal, get_args
from zoneinfo import ZoneInfo

from toolcell.errors import UsageError
from toolcell.support.checks import brief

Frequency = Literal["once", "daily", "custom", "weekly", "monthly"]

FREQUENCIES: tuple[Frequency, ...] = get_args(Frequency)
DEFAULT_TIME = "08:00"
DEFAULT_DAYS: dict[str, str] = {"custom": "monday,wednesday,friday", "weekly": "monday", "monthly": "1"}
UTC = "UTC"

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_INDONESIAN = {
    "senin": 0,
    "selasa": 1,
    "rabu": 2,
    "kamis": 3,
    "jumat": 4,
    "jum'at": 4,
    "sabtu": 5,
    "minggu": 6,
    "ahad": 6,
}
_WEEKDAY_OF = {name: index for index, day in enumerate(WEEKDAYS) for name in (day, day[:3])} | _INDONESIAN

_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_TEXT = re.compile(r"(?:(?P<time>[0-9]\S*)\s+)?(?P<rule>[A-Za-z]+)\s*(?:\((?P<days>[^()]*)\))?(?:\s+(?P<zone>\S+))?")
_ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*")
_OFFSET = re.compile(r"([+-])([0-9]{2}):([0-9]{2})")
MAX_TEXT_CHARS = 200
LAST_MOMENT = 250_000_000_000
"""Unix seconds, in the year 9892: later ones have no next month in `datetime`."""
FIRST_DAY_IN_DOUBT = 28
"""The last day of the month that every month has."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A schedule: a local time, the days on which it counts, and the time zone."""

    hour: int
    minute: int
    frequency: Frequency
    weekdays: tuple[int, ...] = ()
    """Monday is 0. Only of `custom` and `weekly`."""
    day_of_month: int = 1
    """Only of `monthly`. A month that has no such day counts with its last one."""
    zone: str = UTC
    """An IANA name such as Asia/Jakarta, or an offset such as +07:00."""

    def __str__(self) -> str:
        """Shape: "08:00 weekly(monday)", followed by the zone unless it is UTC."""
        zone = "" if self.zone == UTC else f" {self.zone}"
        return f"{self.time} {self.frequency}{f'({self.days})' if self.days else ''}{zone}"

    @property
    def time(self) -> str:
        """Shape: "08:00"."""
        return f"{self.hour:02}:{self.minute:02}"

    @property
    def days(self) -> str:
        """What stands in the parentheses: names of weekdays, a day of the month, or nothing."""
        if self.frequency == "monthly":
            return str(self.day_of_month)
        return ",".join(WEEKDAYS[day] for day in self.weekdays)

    def next_after(self, moment: float) -> int:
        """Return the first time later than `moment`. Both are unix seconds.

        Raises:
            UsageError: `moment` is before 1970 or after the year 9892.
        """
        if not 0 <= moment <= LAST_MOMENT:
            raise UsageError(f"a moment must be between 0 and {LAST_MOMENT} unix seconds, not {brief(moment)}")
        zone = zone_of(self.zone)
        # Two days back: a clock change moves a time by a day at most (Samoa left out 30 December 2011).
        today = datetime.fromtimestamp(moment, zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
        at = clock_time(self.hour, self.minute, tzinfo=zone)
        for day in self._dates(today - timedelta(days=2)):
            due = int(datetime.combine(day, at).timestamp())
            if due > moment:
                return due
        raise AssertionError("a rule without an end has a next date")

    def _dates(self, first: datetime) -> Iterator[datetime]:
        from dateutil import rrule

        match self.frequency:
            case "once" | "daily":
                return iter(rrule.rrule(rrule.DAILY, dtstart=first))
            case "custom" | "weekly":
                return iter(rrule.rrule(rrule.WEEKLY, dtstart=first, byweekday=self.weekdays))
            case "monthly":
                wanted = range(min(self.day_of_month, FIRST_DAY_IN_DOUBT), self.day_of_month + 1)
                return iter(rrule.rrule(rrule.MONTHLY, dtstart=first, bymonthday=tuple(wanted), bysetpos=-1))

    def local(self, moment: float) -> str:
        """Shape: "2026-11-23 08:00", in the schedule's zone."""
        return datetime.fromtimestamp(moment, zone_of(self.zone)).strftime("%Y-%m-%d %H:%M")


def check_dates() -> None:
    """Refuse to go on without the library of dates.

    Raises:
        UsageError: says what to install.
    """
    if importlib.util.find_spec("dateutil") is None:
        raise UsageError("schedules need python-dateutil; install it: pip install 'toolcell[builtin]'")


def recurrence_of(frequency: str, *, time: str = "", day: str = "", zone: str = UTC) -> Recurrence:
    """Return the schedule that these words describe. What is left empty has the default of its frequency.

    `time`: "HH:MM". `day`: names of weekdays, English or Indonesian, or a day of the month.

    Raises:
        UsageError: names the word that is wrong, and what it may be.
    """
    hour, minute = _time_of(time.strip() or DEFAULT_TIME)
    chosen = next((each for each in FREQUENCIES if each == frequency.strip().lower()), None)
    if chosen is None:
        raise UsageError(f"recurrence must be one of {', '.join(FREQUENCIES)}, not {brief(frequency)}")
    if chosen in ("once", "daily") and day.strip():
        raise UsageError(f"{chosen} takes no day, not {brief(day)}; use weekly, custom or monthly for certain days")
    days = day.strip() or DEFAULT_DAYS.get(chosen, "")
    zone_of(zone)
    if chosen == "monthly":
        return Recurrence(hour, minute, chosen, day_of_month=_day_of_month(days), zone=zone)
    weekdays = () if chosen in ("once", "daily") else _weekdays(days)
    if chosen == "weekly" and len(weekdays) != 1:
        raise UsageError(f"weekly takes one day, not {brief(day)}; use custom for several")
    return Recurrence(hour, minute, chosen, weekdays, zone=zone)


def parse_recurrence(text: str) -> Recurrence:
    """Read "HH:MM once|daily|custom(d1,d2)|weekly(day)|monthly(N)", with a zone behind it or none for UTC.

    Raises:
        UsageError: says what is wrong and what a schedule looks like.
    """
    shape = "HH:MM, then once, daily, custom(monday,friday), weekly(monday) or monthly(1), then a time zone"
    found = _TEXT.fullmatch(text.strip()) if len(text) <= MAX_TEXT_CHARS else None
    if found is None:
        raise UsageError(f"{brief(text)} is not a schedule; it looks like: {shape}")
    return recurrence_of(found["rule"], time=found["time"] or "", day=found["days"] or "", zone=found["zone"] or UTC)


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its IANA name or its offset, "+07:00".

    Raises:
        UsageError: there is none of that name.
    """
    if found := _OFFSET.fullmatch(name):
        sign, hours, minutes = found.groups()
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        if int(minutes) < 60 and offset <= timedelta(hours=14):
            return timezone(-offset if sign == "-" else offset)
    elif _ZONE_NAME.fullmatch(name) and len(name) <= MAX_TEXT_CHARS:
        try:
            return ZoneInfo(name)
        except (OSError, ValueError, KeyError):  # no such file, a folder, no zone file
            pass
    raise UsageError(f"no time zone is called {brief(name)}; write an IANA name such as Asia/Jakarta, or +07:00")


def offset_zone(hours: object) -> str:
    """Return the zone of a whole number of hours ahead of UTC.

    Raises:
        UsageError: it is not a whole number from -12 to 14.
    """
    if not isinstance(hours, int) or isinstance(hours, bool) or not -12 <= hours <= 14:
        raise UsageError(f"tz_offset must be a whole number of hours from -12 to 14, not {brief(hours)}")
    return UTC if hours == 0 else f"{'+' if hours > 0 else '-'}{abs(hours):02}:00"


def _time_of(text: str) -> tuple[int, int]:
    found = _TIME.fullmatch(text)
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise UsageError(f"time must be HH:MM from 00:00 to 23:59, not {brief(text)}")
    return int(found[1]), int(found[2])


def _weekdays(text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.lower().split(",") if name.strip()]
    if unknown := [name for name in names if name not in _WEEKDAY_OF]:
        raise UsageError(f"no day of the week is called {brief(unknown[0])}; write {', '.join(WEEKDAYS)}")
    if not names:
        raise UsageError(f"{brief(text)} names no day of the week; write {', '.join(WEEKDAYS)}")
    return tuple(sorted({_WEEKDAY_OF[name] for name in names}))


def _day_of_month(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text) or not 1 <= int(text) <= 31:
        raise UsageError(f"monthly takes a day of the month from 1 to 31, not {brief(text)}")
    return int(text)
