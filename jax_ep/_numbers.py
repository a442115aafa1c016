"""Checks of the numbers that users pass."""

import operator
from typing import Any

import numpy as np

# More than any GPU has; the extension counts them in 32 bits.
MOST_SMS = 2**16


def integer(value: Any) -> int | None:
    """A Python or NumPy integer as an int; None if it is none, or is known only when the program runs."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:  # of traced arrays, too
        return None


def time_out(value: Any) -> float:
    """A Group's timeout_s: a positive number of seconds, infinity included."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"Group: timeout_s must be a number of seconds, got {value!r}")
    if not value > 0:  # nor is nan
        raise ValueError(f"Group: timeout_s must be positive, got {value}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def most_sms(of: str, value: Any) -> int | None:
    """The num_sms of a Group or a product: the most SMs that an op may take, or None."""
    if value is None:
        return None
    number = integer(value)
    if number is None:
        raise TypeError(f"{of}: num_sms must be an int of at least 2 (or None), got {value!r}")
    if not 2 <= number <= MOST_SMS:
        raise ValueError(f"{of}: num_sms must be between 2 and {MOST_SMS} (or None), got {number}")
    return number
