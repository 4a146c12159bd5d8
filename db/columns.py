"""Types of columns: moments with their zone, and text that every database takes."""

from datetime import UTC, datetime

from sqlalchemy import DateTime, Dialect, String, Text, TypeDecorator


class Instant(TypeDecorator[datetime]):
    """A moment: aware in Python, UTC without a zone in the database."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC, the zone dropped."""
        return value.astimezone(UTC).replace(tzinfo=None) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Back to an aware moment."""
        return value.replace(tzinfo=UTC) if value else None


def clean(text: str) -> str:
    r"""Text that every database takes.

    NUL, which Postgres refuses, becomes its picture; half a surrogate pair, which UTF-8 cannot hold, its number.

    >>> clean("7\x00\ud800")
    '7␀\\ud800'
    """
    return text.replace("\0", "␀").encode("utf-8", "backslashreplace").decode()


class CleanText(TypeDecorator[str]):
    """Text of any origin, such as a model's answer."""

    impl: type[String] = Text  # a String without a length
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Without what a database refuses."""
        return clean(value) if isinstance(value, str) else value


class CleanString(CleanText):
    """Text of a known length at most."""

    impl = String
    cache_ok = True
