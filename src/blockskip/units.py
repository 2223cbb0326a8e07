"""Sizes, times and numbers as people read them: three digits and a unit."""

from __future__ import annotations

import math

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _decimals(value: float) -> int:
    """Decimals that leave three significant digits: 0.31, 1.84, 41.2, 412, 1024."""
    return 2 if value < 1 else max(0, 2 - math.floor(math.log10(value)))


def size(*amounts: int) -> str:
    """``412 MiB``; of several amounts ``412 MiB (380 + 95)``: the first, and in brackets its parts in its unit."""
    scale, unit = next(((scale, unit) for scale, unit in _SIZES if amounts[0] >= 0.9995 * scale), (1, "B"))
    decimals = _decimals(amounts[0] / scale) if scale > 1 else 0
    numbers = [f"{amount / scale:.{decimals}f}" for amount in amounts]
    parts = f" ({' + '.join(numbers[1:])})" if len(numbers) > 1 else ""
    return f"{numbers[0]} {unit}{parts}"


def duration(seconds: float) -> str:
    """``3.4 s``, ``42 s``, ``3 min 05 s``, ``1 h 02 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = int(seconds / 60 + 0.5)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int) -> str:
    """``812``, ``9.31 k``, ``18.2 M``, ``11.9 B``."""
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:.{_decimals(number / scale)}f} {unit}"
    return str(number)


def change(value: float, reference: float) -> str:
    """How the value differs from the reference: ``-55%``, ``+12%``, ``same``."""
    percent = round(100 * (value / reference - 1)) if reference else 0
    return f"{percent:+d}%" if percent else "same"


def work(operations: int) -> str:
    """``812 FLOP``, ``9.51 TFLOP``, ``21.4 PFLOP``: floating-point operations."""
    for scale, unit in ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M")):
        if operations >= 0.9995 * scale:
            return f"{operations / scale:.{_decimals(operations / scale)}f} {unit}FLOP"
    return f"{operations} FLOP"
