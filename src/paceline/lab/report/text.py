"""Numbers for readers."""

from datetime import UTC, datetime

from paceline.lab.point import Point

MISSING = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Three significant digits, or all digits before the point: ``0.0123``, ``4.56``, ``12,345``; a dash for None."""
    if value is None:
        return MISSING
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, without the unit."""
    return MISSING if seconds is None else number(seconds * 1e3)


def duration(seconds: float | None) -> str:
    """``1.23 s`` or ``15.2 ms``."""
    if seconds is None:
        return MISSING
    return f"{number(seconds)} s" if abs(seconds) >= 1 else f"{number(seconds * 1e3)} ms"


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{share * 100:.1f}%"


def listing(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}" if words else ""


def error_lines(point: Point, most: int = 3) -> list[str]:
    """What requests failed of, the most frequent first."""
    found = sorted(point.errors.items(), key=lambda item: item[1], reverse=True)
    lines = [f"{count:,} failed: {one_line(error)}" for error, count in found[:most]]
    if len(found) > most:
        lines.append(f"{sum(count for _, count in found[most:]):,} failed otherwise")
    return lines


def one_line(text: str, most: int = 300) -> str:
    """What others wrote, such as a page of HTML, cut to a line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}\N{HORIZONTAL ELLIPSIS}"


def moment(iso: str) -> str:
    """``2026-11-30 12:00 UTC`` of a time in ISO 8601; other text as it is."""
    try:
        time = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
