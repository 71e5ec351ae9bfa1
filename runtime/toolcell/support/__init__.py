"""Small helpers that any floor may use. They know nothing of sandboxes, tools or runs."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CONNECTION", "ELEMENT_WORK", "LONGEST_FORM", "MAX_ARGS", "MAX_ASKED_CHARS", "ChangeEvent",
    "HttpLimits", "HttpServer", "Lifetime", "Lru", "OpenedInBlock", "SecretSearch", "SqliteDatabase", "TimeSlice",
    "TokenBucket", "TooLong", "about_bytes_in_slices", "allow_connections", "arguments_text", "as_one_line",
    "bounded_protocol", "bracketed", "changed", "check_keywords", "clean", "closest", "counted", "cut_text",
    "daemon_threads", "did_you_mean", "exact_json_bytes", "exact_json_text", "for_terminal", "from_exact",
    "fused_ranks", "is_locked", "is_loopback", "is_small", "json_size", "json_start", "json_text",
    "keywords_known", "keywords_of", "lazy_names", "left_out", "listening", "lock", "logger_of", "make_private_folder",
    "one_line", "parse_time", "quiet_from_here", "quiet_loggers", "read_regular_file", "search_for", "shown_findings",
    "suggestion", "table_text", "table_with_rows", "url_of", "wait_for", "with_line", "write_file", "write_named",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.support import daemon_threads
    from toolcell.support.about_tables import table_with_rows
    from toolcell.support.asgi import HttpServer, allow_connections, bracketed, is_loopback, listening, url_of
    from toolcell.support.atomic import write_file, write_named
    from toolcell.support.blocking import wait_for
    from toolcell.support.call_text import MAX_ARGS, MAX_ASKED_CHARS, arguments_text, table_text
    from toolcell.support.change_event import ChangeEvent
    from toolcell.support.copies import changed
    from toolcell.support.exact_json import (
        TooLong,
        exact_json_bytes,
        exact_json_text,
        from_exact,
        is_small,
        json_size,
        json_start,
        json_text,
        left_out,
    )
    from toolcell.support.file_lock import is_locked, lock
    from toolcell.support.host_work import ELEMENT_WORK, about_bytes_in_slices
    from toolcell.support.http_protocol import CONNECTION, HttpLimits, bounded_protocol
    from toolcell.support.keywords import check_keywords, keywords_known, keywords_of
    from toolcell.support.lazy import lazy_names
    from toolcell.support.lifetime import Lifetime, OpenedInBlock
    from toolcell.support.log import logger_of
    from toolcell.support.lru import Lru
    from toolcell.support.private_files import make_private_folder, read_regular_file
    from toolcell.support.quiet import quiet_from_here, quiet_loggers
    from toolcell.support.ranking import fused_ranks
    from toolcell.support.secret_forms import LONGEST_FORM
    from toolcell.support.secrets import SecretSearch, search_for
    from toolcell.support.spelling import closest, did_you_mean, suggestion
    from toolcell.support.sqlite import SqliteDatabase
    from toolcell.support.text import (
        as_one_line,
        clean,
        counted,
        cut_text,
        for_terminal,
        one_line,
        shown_findings,
        with_line,
    )
    from toolcell.support.time_slice import TimeSlice
    from toolcell.support.times import parse_time
    from toolcell.support.token_bucket import TokenBucket
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.support.about_tables": "table_with_rows",
            "toolcell.support.asgi": "HttpServer allow_connections bracketed is_loopback listening url_of",
            "toolcell.support.atomic": "write_file write_named",
            "toolcell.support.blocking": "wait_for",
            "toolcell.support.call_text": "MAX_ARGS MAX_ASKED_CHARS arguments_text table_text",
            "toolcell.support.change_event": "ChangeEvent",
            "toolcell.support.copies": "changed",
            "toolcell.support.exact_json": (
                "TooLong exact_json_bytes exact_json_text from_exact is_small json_size json_start json_text left_out"
            ),
            "toolcell.support.file_lock": "is_locked lock",
            "toolcell.support.host_work": "ELEMENT_WORK about_bytes_in_slices",
            "toolcell.support.http_protocol": "CONNECTION HttpLimits bounded_protocol",
            "toolcell.support.keywords": "check_keywords keywords_known keywords_of",
            "toolcell.support.lazy": "lazy_names",
            "toolcell.support.lifetime": "Lifetime OpenedInBlock",
            "toolcell.support.log": "logger_of",
            "toolcell.support.lru": "Lru",
            "toolcell.support.private_files": "make_private_folder read_regular_file",
            "toolcell.support.quiet": "quiet_from_here quiet_loggers",
            "toolcell.support.ranking": "fused_ranks",
            "toolcell.support.secret_forms": "LONGEST_FORM",
            "toolcell.support.secrets": "SecretSearch search_for",
            "toolcell.support.spelling": "closest did_you_mean suggestion",
            "toolcell.support.sqlite": "SqliteDatabase",
            "toolcell.support.text": (
                "as_one_line clean counted cut_text for_terminal one_line shown_findings with_line"
            ),
            "toolcell.support.time_slice": "TimeSlice",
            "toolcell.support.times": "parse_time",
            "toolcell.support.token_bucket": "TokenBucket",
        },
    )
