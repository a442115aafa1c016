"""Progress of the benchmark, on stderr, so that it does not mix with the tables on stdout."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column


class Row(Protocol):
    """A measurement."""

    @property
    def label(self) -> str: ...
    @property
    def us(self) -> float: ...


AnyRow = TypeVar("AnyRow", bound=Row)


def track(part: str, rows: Iterable[AnyRow], total: int | None, *, quiet: bool) -> Iterator[AnyRow]:
    """Yields the rows of a part of the benchmark, and shows each: its number, its time and its label.

    Shows a bar with the last row if stderr is a terminal, and otherwise a line for each row. `total`: the
    number of rows, or None if it is unknown.
    """
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        begin = time.perf_counter()
        for number, row in enumerate(rows, 1):
            if not quiet:
                count = f"{number}" if total is None else f"{number}/{total}"
                after = time.perf_counter() - begin
                print(f"{part} {count}, {after:.0f} s: {_text(row)}", file=sys.stderr, flush=True)
            yield row
        return
    columns = (SpinnerColumn(), TextColumn(part), BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn())
    # Only the last row is cut short on a narrow terminal.
    last = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    with Progress(*columns, last, console=console, transient=True, expand=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total)
        for row in rows:
            bar.update(task, advance=1, description=_text(row))
            yield row


def _text(row: Row) -> str:
    return f"{row.us:.1f} us, {row.label}"
