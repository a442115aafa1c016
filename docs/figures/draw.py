"""Draws the figures of the documentation: `python docs/figures/draw.py` writes them beside this file.

All but `skew` show one small example: two ranks, a with the tokens a0 to a2 and b with b0 to b2, two experts
on each rank, two choices a token. tests/docs/test_docs.py compares what they show with what the ops do.
`skew` shows a plan that `jax_ep.plan_redundant_experts` computes.

The colours are CSS variables. On its own, a figure follows the reader's system; in the pages of the site it
is part of the page and follows the page's palette (docs/theme/extra.css).
"""

from html import escape
from pathlib import Path

import numpy as np

import jax_ep

TOKENS = ("a0", "a1", "a2", "b0", "b1", "b2")
CHOICES = {"a0": (0, 2), "a1": (1, 3), "a2": (0, 3), "b0": (0, 1), "b1": (2, 3), "b2": (1, 2)}
RANKS, EXPERTS_PER_RANK = 2, 2

# The example of `skew`: rows of 4096 tokens of each rank, which choose eight experts each.
SKEW_RANKS, SKEW_EXPERTS, SKEW_PLACES, SKEW_ROWS = 8, 256, 2, 32768

STYLE = """
.figure {
  --ink: #1f2933; --soft: #5c6773; --line: #9aa5b1; --paper: #f2f4f7; --a: #2f6fb0; --b: #b3541e; --on: #fff;
  --gone: #c0262d;
  font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; max-width: 100%; height: auto;
}
@media (prefers-color-scheme: dark) {
  .figure {
    --ink: #e4e7eb; --soft: #a5b1bd; --line: #64707d; --paper: #2b323b; --a: #6ea8e0; --b: #e59a62;
    --on: #14181d; --gone: #ff7b80;
  }
}
.figure text { fill: var(--ink); }
.figure .soft { fill: var(--soft); }
.figure .bold { font-weight: 600; }
.figure .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
.figure .on { fill: var(--on); }
.figure .gone { fill: var(--gone); }
.figure .frame { fill: none; stroke: var(--line); }
.figure .empty { fill: var(--paper); stroke: var(--line); }
.figure .out { fill: none; stroke: var(--gone); stroke-dasharray: 4 3; }
.figure .a { fill: var(--a); } .figure .b { fill: var(--b); }
.figure .to { fill: none; stroke-width: 1.5; opacity: 0.75; }
.figure .to.a { stroke: var(--a); fill: none; } .figure .to.b { stroke: var(--b); fill: none; }
.figure .rule { stroke: var(--line); stroke-dasharray: 2 3; }
.figure .tip { fill: none; stroke: var(--line); stroke-width: 1.5; }
"""


def rows_by_expert(rank: int) -> list[tuple[int, str]]:
    """The (local expert, token) of each row at a rank, in the order of the buffer."""
    experts = range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    return [
        (local, token) for local, expert in enumerate(experts) for token in TOKENS if expert in CHOICES[token]
    ]


def rows_by_rank(rank: int) -> list[tuple[tuple[int, ...], str]]:
    """The (local experts, token) of each row at a rank, in the order of the buffer."""
    first = rank * EXPERTS_PER_RANK
    rows = []
    for token in TOKENS:
        here = tuple(e - first for e in CHOICES[token] if 0 <= e - first < EXPERTS_PER_RANK)
        if here:
            rows.append((here, token))
    return rows


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'


def cell(x: float, y: float, token: str, width: float = 44, height: float = 24) -> str:
    """A row that holds a token, in the colour of the rank that it comes from."""
    middle = text(x + width / 2, y + height / 2 + 5, token, "on bold")
    return box(x, y, width, height, token[0]) + middle


def dropped(x: float, y: float, token: str, width: float = 44, height: float = 24) -> str:
    return box(x, y, width, height, "out") + text(x + width / 2, y + height / 2 + 5, token, "gone")


def curve(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    bend = (x1 - x0) / 2
    path = f"M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"
    return f'<path d="{path}" class="to {kind}"/>'


def arrow(x0: float, x1: float, y: float) -> str:
    return f'<path d="M{x0:g} {y:g} H{x1:g} m-7 -5 l7 5 l-7 5" class="tip"/>'


def figure(width: int, height: int, title: str, parts: list[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" {size}>',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def layer() -> str:
    """Tokens of two ranks to the rows of their experts, and back."""
    parts = []
    left, middle, right, step = 70, 330, 610, 28
    tokens_at, rows_at, out_at = {}, {}, {}
    for rank, name in enumerate("ab"):
        top = 64 + rank * 256
        parts.append(text(left - 56, top + 84, f"rank {name}", "bold", "start"))
        for i, token in enumerate(t for t in TOKENS if t[0] == name):
            y = top + 42 + i * step
            parts.append(cell(left + 14, y, token))
            parts.append(cell(right, y, token))
            tokens_at[token], out_at[token] = (left + 58, y + 12), (right, y + 12)
        experts = rows_by_expert(rank)
        for i, (local, token) in enumerate(experts):
            y = top + i * step + local * 20
            parts.append(cell(middle, y, token))
            parts.append(cell(middle + 96, y, token))
            parts.append(arrow(middle + 50, middle + 90, y + 12))
            rows_at[rank, local, token] = y + 12
            if i % 3 == 0:
                number = rank * EXPERTS_PER_RANK + local
                parts.append(text(middle + 70, y - 6, f"expert {number}", "soft"))
        y = top + len(experts) * step + 20
        parts.append(box(middle, y, 44, 24, "empty") + text(middle + 22, y + 16, "0", "soft"))
        parts.append(text(middle + 52, y + 16, "tail", "soft", "start"))
    for (_, _, token), y in rows_at.items():
        parts.append(curve(*tokens_at[token], middle, y, token[0]))
        parts.append(curve(middle + 140, y, *out_at[token], token[0]))
    parts += [
        text(left + 36, 20, "tokens", "bold"),
        text(left + 36, 38, "x [T, H]", "code soft"),
        text((left + middle) / 2 + 24, 20, "dispatch", "code"),
        text(middle + 70, 20, "rows by expert", "bold"),
        text(middle + 70, 38, "[C, H]", "code soft"),
        text((middle + right) / 2 + 82, 20, "combine", "code"),
        text(right + 22, 20, "sums", "bold"),
        text(right + 22, 38, "[T, H]", "code soft"),
    ]
    title = "Each token goes to one row for each of its two experts, and the results come back as one sum"
    return figure(690, 560, title, parts)


def orders() -> str:
    """The buffer of rank a in both orders, and permute between them."""
    parts = []
    by_rank, by_expert = 150, 520
    rank_at = {}
    parts += [
        text(by_rank + 22, 20, 'order="rank"', "code bold"),
        text(by_expert + 22, 20, 'order="expert"', "code bold"),
        text(by_rank + 22, 42, "a row for each token", "soft"),
        text(by_expert + 22, 42, "a row for each choice", "soft"),
        text((by_rank + by_expert) / 2 + 22, 20, "permute", "code"),
    ]
    for i, (experts, token) in enumerate(rows_by_rank(0)):
        y = 62 + i * 32
        parts.append(cell(by_rank, y, token))
        listed = ", ".join(str(e) for e in (*experts, -1)[:2])
        parts.append(text(by_rank - 12, y + 17, f"[{listed}]", "code soft", "end"))
        rank_at[token] = y + 12
    parts.append(text(by_rank - 12, 62 + 5 * 32 + 18, "local ids topk_idx", "soft", "end"))
    for i, (local, token) in enumerate(rows_by_expert(0)):
        y = 62 + i * 28 + local * 14
        parts.append(cell(by_expert, y, token))
        parts.append(curve(by_rank + 44, rank_at[token], by_expert, y + 12, token[0]))
        if i % 3 == 1:
            parts.append(text(by_expert + 58, y + 17, f"expert {local}", "soft", "start"))
    parts.append(text(by_expert + 22, 62 + 6 * 28 + 30, "group_sizes [3, 3]", "code soft"))
    return figure(660, 272, "The rows that arrive at rank a, by rank and by expert", parts)


def drops() -> str:
    """What five rules keep of the six rows for rank a, where it has room for four."""
    choices = [f"{token} {local}" for local, token in rows_by_expert(0)]
    # The rows of each panel in the order of the buffer, and how many find a place.
    by_source = sorted(choices, key=lambda row: (row[0], row[3], row[1]))
    panels = [
        ('jax_ep, order="expert": the last experts\' rows go first', [(choices, 4)]),
        ('jax_ep, order="rank": the last ranks\' tokens go first', [([t for _, t in rows_by_rank(0)], 4)]),
        ("one buffer by source, a row for each choice: the last ranks' rows", [(by_source, 4)]),
        ("room for two at each expert, the first come first", [(choices[:3], 2), (choices[3:], 2)]),
        (
            "room for two at each expert, the ranks take turns",
            [([choices[0], choices[2], choices[1]], 2), (choices[3:], 2)],
        ),
    ]
    parts = []
    for i, (name, buffers) in enumerate(panels):
        y = 14 + i * 92
        parts.append(text(10, y + 8, name, "bold" if i < 2 else "", "start"))
        x = 10.0
        for rows, room in buffers:
            parts.append(box(x, y + 18, room * 54 + 6, 36, "frame"))
            for j, row in enumerate(rows):
                at = x + 6 + j * 54 + (14 if j >= room else 0)
                parts.append((cell if j < room else dropped)(at, y + 24, row[:2], 48))
                if len(row) > 2:
                    parts.append(text(at + 24, y + 68, f"e{row[3]}", "soft"))
            x += len(rows) * 54 + 44
    return figure(480, 462, "Which of six rows are kept where there is room for four", parts)


def protocol() -> str:
    """The four steps of an op on two ranks, one of which comes later."""
    parts = []
    entered, left, end = 330, 560, 690
    for rank, (begin, moved) in enumerate(((90, 500), (230, 548))):
        y = 62 + rank * 96
        name = "ab"[rank]
        parts.append(text(14, y + 22, f"rank {name}", "bold", "start"))
        parts.append(box(begin, y, 70, 34, name) + text(begin + 35, y + 22, "count", "on"))
        start = begin + 76
        if entered - start > 40:
            parts.append(box(start, y, entered - start - 3, 34, "empty"))
            parts.append(text((start + entered) / 2, y + 22, "waits", "soft"))
        parts.append(box(entered + 3, y, moved - entered - 6, 34, name))
        parts.append(text((entered + moved) / 2, y + 22, "moves rows", "on"))
        if left - moved > 40:
            parts.append(box(moved, y, left - moved - 3, 34, "empty"))
            parts.append(text((moved + left) / 2, y + 22, "waits", "soft"))
        parts.append(text(left + 10, y + 22, "next op", "soft", "start"))
    for x, words in ((entered, "all have entered"), (left, "all have left")):
        parts.append(f'<path d="M{x} 44 V206" class="rule"/>' + text(x, 34, words, "code"))
    parts.append(f'<path d="M{entered} 220 H{left} M{entered} 214 v12 M{left} 214 v12" class="tip"/>')
    parts.append(text((entered + left) / 2, 244, "only here do peers touch a rank's memory"))
    return figure(end, 258, "The steps of an op: count, enter, move, leave", parts)


def skewed_counts() -> np.ndarray:
    """Returns int32 [R, E]: rows of each rank for each expert, whose popularity is lognormal, sigma 1.5."""
    rng = np.random.default_rng(9)
    popularity = rng.lognormal(0, 1.5, SKEW_EXPERTS)
    rows = rng.multinomial(SKEW_ROWS, popularity / popularity.sum(), size=SKEW_RANKS)
    return rows.astype(np.int32)


def skew() -> str:
    """Draws rows of eight ranks before and after a plan of redundant experts, and the moves."""
    plan = jax_ep.plan_redundant_experts(skewed_counts(), num_redundant_experts=SKEW_PLACES)
    local = SKEW_EXPERTS // SKEW_RANKS
    logical = np.asarray(plan.physical_to_logical).reshape(SKEW_RANKS, -1)[:, local:]
    rows = np.asarray(plan.rows_per_expert).reshape(SKEW_RANKS, -1)
    before, after = (np.asarray(loads) / SKEW_ROWS for loads in (plan.loads_before, plan.loads_after))
    moves = [  # expert, its home, the rank that computes the rows, their number
        (int(expert), int(expert) // local, rank, rows[rank, local + place] / SKEW_ROWS)
        for rank in range(SKEW_RANKS)
        for place, expert in enumerate(logical[rank])
        if expert >= 0
    ]
    left, right, top, step, height, mean = 116, 444, 76, 40, 22, 140
    bottom = top + SKEW_RANKS * step - step + height
    parts = [
        text(left, 20, "all rows at home", "bold", "start"),
        text(right, 20, "two redundant experts a rank", "bold", "start"),
        box(left, 32, 14, 14, "a") + text(left + 20, 44, "computed at home", "soft", "start"),
        box(left + 170, 32, 14, 14, "b") + text(left + 190, 44, "moved", "soft", "start"),
        text(right + mean + 10, 44, "moved rows of", "soft", "start"),
    ]
    for rank in range(SKEW_RANKS):
        y = top + rank * step
        leaves = sum(number for _, home, _, number in moves if home == rank)
        arrived = [(expert, number) for expert, _, receiver, number in moves if receiver == rank]
        stays = after[rank] - sum(number for _, number in arrived)
        parts.append(text(14, y + 16, f"rank {rank}", "bold", "start"))
        parts.append(text(left - 10, y + 16, f"{before[rank]:.2f}", "soft", "end"))
        parts.append(text(right - 10, y + 16, f"{after[rank]:.2f}", "soft", "end"))
        for x, widths in ((left, [stays, leaves]), (right, [stays, *(number for _, number in arrived)])):
            at = float(x)
            for i, width in enumerate(widths):
                if width:
                    parts.append(
                        box(round(at, 1), y, round(max(width * mean - 1, 1), 1), height, "b" if i else "a")
                    )
                at += width * mean
        names = ", ".join(str(expert) for expert, _ in arrived)
        if names:
            name = "expert" if len(arrived) == 1 else "experts"
            parts.append(text(right + mean + 10, y + 16, f"{name} {names}", "soft", "start"))
    for _, home, receiver, _ in moves:
        x, y = left + before[home] * mean + 3, top + home * step + height / 2
        parts.append(curve(round(x, 1), y, right - 48, top + receiver * step + height / 2, "b"))
    for x in (left + mean, right + mean):
        parts.append(f'<path d="M{x} {top - 10} V{bottom + 6}" class="rule"/>')
        parts.append(text(x, bottom + 22, "mean", "soft"))
    title = (
        "Rows of eight ranks, relative to their mean, before and after hot experts get redundant instances"
    )
    return figure(720, bottom + 34, title, parts)


FIGURES = {"layer": layer, "orders": orders, "drops": drops, "protocol": protocol, "skew": skew}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw())
