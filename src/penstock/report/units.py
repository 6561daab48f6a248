"""Units: format and parse seconds, bytes, counts and shares."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_seconds(seconds: float, *, digits: int = 4) -> str:
    """Return seconds with a suitable unit and at most the given number of digits.

    >>> show_seconds(0.0123), show_seconds(45.0), show_seconds(2e-6)
    ('12.3 ms', '45 s', '2 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            if seconds < 10**digits * size:
                return f"{seconds / size:,.{digits}g} {unit}"
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.{digits}g} ns" if seconds else "0 s"


def show_bytes(number: float, *, digits: int = 4) -> str:
    """Return bytes with a binary unit and at most the given number of digits.

    >>> show_bytes(3 * 2**30), show_bytes(100)
    ('3 GiB', '100 B')
    """
    unit = 0
    while number >= 1024 and unit < len(_BYTE_UNITS) - 1:
        number /= 1024
        unit += 1
    if number >= 10**digits:  # such as 1020 KiB with three digits
        return f"{number:.0f} {_BYTE_UNITS[unit]}"
    return f"{number:.{digits}g} {_BYTE_UNITS[unit]}"


def show_count(number: float, *, digits: int = 4) -> str:
    """Return a count with a suitable prefix and at most the given number of digits.

    >>> show_count(950), show_count(124_439_808), show_count(7e9)
    ('950', '124.4 M', '7 G')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{digits}g} {unit}"
    return f"{number:g}"


def show_share(share: float) -> str:
    """Return a share as a percentage.

    >>> show_share(0.2431)
    '24.3 %'
    """
    return f"{abs(share) * 100 if round(share, 3) == 0 else 100 * share:.1f} %"  # avoid -0.0 from rounding


def plural(number: int, word: str) -> str:
    """Return a number with a word.

    >>> plural(1, "lane"), plural(2, "micro-batch")
    ('1 lane', '2 micro-batches')
    """
    ending = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{'' if number == 1 else ending}"


def parse_bytes(text: str) -> float:
    """Read bytes with or without a unit.

    >>> parse_bytes("16GiB") == 16 * 2**30, parse_bytes("1.5 kB")
    (True, 1500.0)
    """
    word = text.strip().lower().removesuffix("b").strip()
    powers = {letter: 1000.0**power for power, letter in enumerate("kmgtp", 1)}
    powers |= {f"{letter}i": 1024.0**power for power, letter in enumerate("kmgtp", 1)}
    for unit in sorted(powers, key=len, reverse=True):
        if word.endswith(unit):
            return float(word.removesuffix(unit)) * powers[unit]
    return float(word)


def parse_seconds(text: str) -> float:
    """Read seconds with or without a unit.

    >>> parse_seconds("18.5ms"), parse_seconds("2"), parse_seconds("600 us")
    (0.0185, 2.0, 0.0006)
    """
    word = text.strip().lower().replace("\N{MICRO SIGN}", "u").replace("\N{GREEK SMALL LETTER MU}", "u")
    for unit, size in (("ms", 1e3), ("us", 1e6), ("ns", 1e9), ("s", 1.0)):
        if word.endswith(unit):
            return float(word.removesuffix(unit)) / size
    return float(word)


def printable(name: str) -> str:
    r"""Return a name that is safe to print: control characters are escaped.

    >>> printable("zb\x1b[31m")
    'zb\\x1b[31m'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
