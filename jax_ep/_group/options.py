"""Options that equal groups share while one of them is open."""

import dataclasses
import threading
import warnings

DEFAULT_TIMEOUT_S = 300.0
# Ten years. A longer time-out makes no difference, but its nanoseconds would overflow.
MAX_TIMEOUT_S = 10 * 365 * 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of a Group. None: not passed."""

    timeout_s: float | None
    num_sms: int | None

    @property
    def seconds(self) -> float:
        """Seconds that a rank waits for its peers."""
        return min(DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s, MAX_TIMEOUT_S)

    def _or(self, others: "Options") -> "Options":
        """Returns these options, with those of `others` for the ones that were not passed."""
        return Options(
            others.timeout_s if self.timeout_s is None else self.timeout_s,
            others.num_sms if self.num_sms is None else self.num_sms,
        )


# Group key -> the options of the open groups, and the number of these groups.
_shared: dict[str, tuple[Options, int]] = {}
# Held also while the extension gets the options or closes a group, so that both have the same options.
lock = threading.Lock()


def resolve(key: str, requested: Options) -> Options:
    """Returns `requested`, completed by the options of equal groups that are open."""
    return requested._or(_shared.get(key, (requested, 0))[0])


def add_user(key: str, requested: Options) -> Options:
    """Adds an open group, and returns the options that count from now on. Requires the lock.

    Warns if they differ from the options that were passed to an equal group.
    """
    before, users = _shared.get(key, (requested, 0))
    after = requested._or(before)
    changed = [field for field, old in vars(before).items() if old not in (None, getattr(after, field))]
    if changed:
        new, old = (
            " and ".join(f"{field}={getattr(each, field)}" for field in changed) for each in (after, before)
        )
        warnings.warn(
            f"Group: got {new}, but an equal group that is still open has {old}. Equal groups share these "
            "options, so the new value now counts for all of them. Pass the same value to all of them, omit "
            "it to keep the present one, or close the other groups first.",
            UserWarning,
            stacklevel=4,  # the call of Group
        )
    _shared[key] = after, users + 1
    return after


def drop_user(key: str) -> None:
    """Removes an open group. The last one takes the options with it. Requires the lock."""
    shared, users = _shared.pop(key)
    if users > 1:
        _shared[key] = shared, users - 1
