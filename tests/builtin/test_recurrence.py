"""When a schedule is due: the text, the days, and the clocks that change."""

from __future__ import annotations

import calendar
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.builtin.recurrence import (
    LAST_MOMENT,
    WEEKDAYS,
    Recurrence,
    offset_zone,
    parse_recurrence,
    recurrence_of,
    zone_of,
)
from toolcell.errors import UsageError

ZONES = (
    "UTC", "+07:00", "-11:00", "Asia/Jakarta", "Europe/Berlin", "America/New_York", "America/Sao_Paulo",
    "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kathmandu", "Africa/Casablanca", "America/St_Johns",
)  # fmt: skip
YEAR_S = 366 * 86_400

moments = st.integers(0, 4_102_444_800)  # until 2100
weekdays = st.sampled_from(WEEKDAYS)
recurrences = st.builds(
    lambda hour, minute, chosen, zone: recurrence_of(
        chosen[0], time=f"{hour:02}:{minute:02}", day=chosen[1], zone=zone
    ),
    st.integers(0, 23),
    st.integers(0, 59),
    st.tuples(st.sampled_from(["once", "daily"]), st.just(""))
    | st.tuples(st.just("weekly"), weekdays)
    | st.tuples(st.just("custom"), st.lists(weekdays, min_size=1).map(",".join))
    | st.tuples(st.just("monthly"), st.integers(1, 31).map(str)),
    st.sampled_from(ZONES),
)


def unix(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone_of(zone)).timestamp()


def counts(rule: Recurrence, day: date) -> bool:
    """Said once more, without the library."""
    if rule.frequency == "monthly":
        return day.day == min(rule.day_of_month, calendar.monthrange(day.year, day.month)[1])
    return rule.frequency in ("once", "daily") or day.weekday() in rule.weekdays


def due_on(rule: Recurrence, day: date) -> float:
    return datetime(day.year, day.month, day.day, rule.hour, rule.minute, tzinfo=zone_of(rule.zone)).timestamp()


@pytest.mark.conforms("S10", "S-b6")
@given(rule=recurrences, moment=moments)
def test_the_next_time_is_the_first_on_a_day_that_counts(rule: Recurrence, moment: int) -> None:
    due = rule.next_after(moment)

    assert due > moment
    today = datetime.fromtimestamp(moment, UTC).date()
    days = (today + timedelta(days=offset) for offset in range(-3, 33))
    assert due == min(time for day in days if counts(rule, day) and (time := due_on(rule, day)) > moment)


@pytest.mark.conforms("S10", "S-b6")
@given(rule=recurrences, moment=moments)
def test_the_next_time_is_at_the_local_time_unless_the_clocks_leave_that_out(rule: Recurrence, moment: int) -> None:
    due = rule.next_after(moment)
    local = datetime.fromtimestamp(due, zone_of(rule.zone))

    if (local.hour, local.minute) == (rule.hour, rule.minute):
        assert local.fold == 0  # of two such times, the first
        assert counts(rule, local.date()) or rule.zone == "Pacific/Apia"
        return
    before = datetime.fromtimestamp(due - 86_400, zone_of(rule.zone)).utcoffset()
    gap = (local.utcoffset() or timedelta()) - (before or timedelta())
    assert gap > timedelta()
    assert (local - gap).strftime("%H:%M") == rule.time


@given(rule=recurrences, moment=moments, later=st.integers(0, YEAR_S))
def test_a_later_moment_never_has_an_earlier_next_time(rule: Recurrence, moment: int, later: int) -> None:
    first = rule.next_after(moment)
    second = rule.next_after(moment + later)

    assert second >= first
    assert (second == first) == (moment + later < first)


@given(rule=recurrences)
def test_a_schedule_survives_as_text(rule: Recurrence) -> None:
    assert parse_recurrence(str(rule)) == rule


@pytest.mark.conforms("S10")
@each_row(
    ("text", "canonical"),
    [
        ("08:00 once", "08:00 once"),
        ("8:05 DAILY", "08:05 daily"),
        ("daily", "08:00 daily"),
        ("07:30 custom", "07:30 custom(monday,wednesday,friday)"),
        ("07:30 custom(sun, Mon,sunday)", "07:30 custom(monday,sunday)"),
        ("07:30 custom(senin,selasa,rabu,kamis,jumat,sabtu,minggu)", f"07:30 custom({','.join(WEEKDAYS)})"),
        ("07:30 custom(jum'at,ahad)", "07:30 custom(friday,sunday)"),
        ("07:30 weekly", "07:30 weekly(monday)"),
        ("07:30 weekly(Thu)", "07:30 weekly(thursday)"),
        ("07:30 monthly", "07:30 monthly(1)"),
        ("07:30 monthly(31) Asia/Jakarta", "07:30 monthly(31) Asia/Jakarta"),
        ("daily -03:00", "08:00 daily -03:00"),
        (" 07:30 weekly\n", "07:30 weekly(monday)"),
    ],
)
def test_what_a_schedule_leaves_out_has_its_default(text: str, canonical: str) -> None:
    assert str(parse_recurrence(text)) == canonical


@pytest.mark.conforms("S10")
@each_row(
    ("text", "wrong"),
    [
        ("", "not a schedule"),
        ("24:00 daily", "24:00"),
        ("08:60 daily", "08:60"),
        ("08:00", "not a schedule"),
        ("0800 daily", "0800"),
        ("08:00 hourly", "hourly"),
        ("08:00 weekly(someday)", "someday"),
        ("08:00 weekly(monday,friday)", "one day"),
        ("08:00 custom(,)", "names no day"),
        ("08:00 monthly(0)", "1 to 31"),
        ("08:00 monthly(32)", "1 to 31"),
        ("08:00 monthly(-1)", "1 to 31"),
        ("08:00 monthly(²)", "1 to 31"),
        ("08:00 daily(monday)", "takes no day"),
        ("08:00 daily Mars/Olympus", "Mars/Olympus"),
        ("08:00 daily ../../etc/passwd", "no time zone"),
        ("08:00 daily America", "no time zone"),
        ("08:00 daily +25:00", "no time zone"),
        ("08:00 daily\nUTC\n; DROP TABLE", "not a schedule"),
        ("08:00 daily " + "x" * 10_000, "not a schedule"),
    ],
)
def test_a_wrong_schedule_is_refused_with_what_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        parse_recurrence(text)


@given(text=st.text(max_size=40) | st.from_regex(r"[0-9:]{0,6} ?[a-z]{0,8}\(?[a-z0-9,']{0,9}\)? ?[A-Z/:+0-9]{0,9}"))
def test_any_text_is_a_schedule_or_a_usage_error(text: str) -> None:
    try:
        rule = parse_recurrence(text)
    except UsageError:
        return
    assert parse_recurrence(str(rule)) == rule


@pytest.mark.conforms("S10")
def test_a_time_that_is_past_today_counts_tomorrow_and_one_to_come_counts_today() -> None:
    once = parse_recurrence("08:00 once")

    assert once.next_after(unix("2027-02-01 07:59:59")) == unix("2027-02-01 08:00")
    assert once.next_after(unix("2027-02-01 08:00")) == unix("2027-02-02 08:00")


@pytest.mark.conforms("S10")
@each_row(("hours", "zone"), [(0, "UTC"), (7, "+07:00"), (-3, "-03:00"), (14, "+14:00")])
def test_times_are_local_at_a_whole_number_of_hours(hours: int, zone: str) -> None:
    assert offset_zone(hours) == zone
    rule = recurrence_of("daily", zone=zone)
    midnight = unix("2027-02-01 00:00")
    assert rule.next_after(midnight) == midnight + (8 - hours) % 24 * 3600


@each_row("hours", [True, 1.5, "7", 15, -13, None])
def test_an_offset_that_no_zone_has_is_refused(hours: object) -> None:
    with pytest.raises(UsageError, match="from -12 to 14"):
        offset_zone(hours)


@pytest.mark.conforms("S-b6")
def test_the_31st_is_the_last_day_of_a_shorter_month() -> None:
    rule, moment, days = parse_recurrence("12:00 monthly(31)"), unix("2027-12-31 12:00"), []
    for _ in range(4):
        moment = rule.next_after(moment)
        days.append(rule.local(moment)[:10])

    assert days == ["2028-01-31", "2028-02-29", "2028-03-31", "2028-04-30"]


@pytest.mark.conforms("S-b6")
@each_row(
    ("text", "before", "first", "second"),
    [  # the clocks of Berlin: 02:00 to 03:00 on 28 March, 03:00 to 02:00 on 31 October 2027
        ("02:30 daily Europe/Berlin", "2027-03-27 12:00", "2027-03-28T03:30:00+02:00", "2027-03-29T02:30:00+02:00"),
        ("02:30 daily Europe/Berlin", "2027-10-30 12:00", "2027-10-31T02:30:00+02:00", "2027-11-01T02:30:00+01:00"),
        ("08:00 daily Europe/Berlin", "2027-03-27 12:00", "2027-03-28T08:00:00+02:00", "2027-03-29T08:00:00+02:00"),
        # Samoa had no 30 December 2011
        ("08:00 daily Pacific/Apia", "2011-12-29 12:00", "2011-12-29T08:00:00-10:00", "2011-12-31T08:00:00+14:00"),
        (
            "08:00 monthly(30) Pacific/Apia",
            "2011-12-30 11:00",
            "2011-12-31T08:00:00+14:00",
            "2012-01-30T08:00:00+14:00",
        ),
    ],
)
def test_clocks_that_change(text: str, before: str, first: str, second: str) -> None:
    rule = parse_recurrence(text)
    due = rule.next_after(unix(before, "UTC"))
    after = rule.next_after(due)

    assert [datetime.fromtimestamp(each, zone_of(rule.zone)).isoformat() for each in (due, after)] == [first, second]


@each_row("moment", [-1, float("nan"), float("inf"), LAST_MOMENT + 1])
def test_a_moment_outside_of_the_calendar_is_refused(moment: float) -> None:
    with pytest.raises(UsageError, match="unix seconds"):
        parse_recurrence("daily").next_after(moment)


@each_row("zone", ZONES)
def test_the_last_moment_has_a_next_one(zone: str) -> None:
    assert parse_recurrence(f"monthly(31) {zone}").next_after(LAST_MOMENT) > LAST_MOMENT
