"""The plan of redundant experts in plain Python: an oracle for every backend."""

from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """R ranks, E logical experts, L = E / R home experts and S places a rank, P = R * (L + S)."""

    physical_to_logical: np.ndarray  # [P] -1 empty place
    quotas: np.ndarray  # [P] rows that each physical expert gets
    order: np.ndarray  # [P] physical experts by logical expert, then rank; empty places last
    ends: np.ndarray  # [R, P] choices of rank s, sorted by logical expert, that go to order[: i + 1]

    def loads(self, num_ranks: int) -> np.ndarray:
        """Returns [R]: rows of each rank."""
        return self.quotas.reshape(num_ranks, -1).sum(axis=1)


def plan(counts: np.ndarray, num_places: int, tolerance: int = 0, min_rows: int = 1) -> Plan:
    """Plans where rows go. `counts` [R, E]; `tolerance` in thousandths of the mean."""
    ranks, experts = counts.shape
    local = experts // ranks
    rows = counts.sum(axis=0).astype(int).tolist()  # rows of each expert that stay at home
    load = np.asarray(rows).reshape(ranks, local).sum(axis=1).tolist()
    mean = -(-sum(load) // ranks)
    target = mean + mean // 1000 * tolerance + mean % 1000 * tolerance // 1000
    places: list[dict[int, int]] = [{} for _ in range(ranks)]  # expert -> rows, in the order of their moves

    def move(expert: int, receiver: int, number: int) -> None:
        places[receiver][expert] = places[receiver].get(expert, 0) + number
        rows[expert] -= number
        load[receiver] += number
        load[expert // local] -= number

    if num_places == local:
        fill(rows, load, target, min_rows, local, move)
    elif num_places > 0:
        spread(rows, load, target, min_rows, local, num_places, places, move)
    return divide(counts, rows, places, num_places)


def fill(rows, load, target, min_rows, local, move) -> None:
    """With a place for every expert, fills the emptiest rank from the fullest one."""
    while True:
        donor = max(range(len(load)), key=lambda rank: (load[rank], -rank))
        receiver = min(range(len(load)), key=lambda rank: (load[rank], rank))
        if load[donor] - target < max(min_rows, 1):
            return
        need = target - load[receiver]
        while need > 0:
            home = range(donor * local, donor * local + local)
            expert = max(home, key=lambda expert: (rows[expert], -expert))
            number = min(need, rows[expert])
            move(expert, receiver, number)
            need -= number


def spread(rows, load, target, min_rows, local, num_places, places, move) -> None:
    """Moves rows of the largest expert of the fullest rank, as long as there is a place for them."""
    ranks = range(len(load))
    blocked: set[int] = set()
    while True:
        # Ranks whose experts are all blocked do not count.
        open_ranks = [
            rank
            for rank in ranks
            if load[rank] > target and not blocked.issuperset(range(rank * local, rank * local + local))
        ]
        if not open_ranks:
            return
        donor = max(open_ranks, key=lambda rank: (load[rank], -rank))
        home = [e for e in range(donor * local, donor * local + local) if e not in blocked]
        expert = max(home, key=lambda expert: (rows[expert], -expert))
        amount = min(load[donor] - target, rows[expert])

        def takes(rank: int, expert: int = expert) -> bool:
            return expert in places[rank] or len(places[rank]) < num_places

        receivers = [rank for rank in ranks if load[rank] < target and takes(rank)]
        if receivers:
            receiver = max(receivers, key=lambda rank: (target - load[rank], -rank))
            number = min(amount, target - load[receiver])
            if number >= max(min_rows, 1):
                move(expert, receiver, number)
                continue
        # A relay: a rank without room takes the rows, and passes as many of its own to a place that has them.
        best, relayed, receiver = 0, -1, -1
        for rank in ranks:
            for other, _ in places[rank].items():
                home_of_other = other // local
                if home_of_other == donor or not takes(home_of_other):
                    continue
                number = min(amount, target - load[rank], rows[other])
                if number > best:
                    best, relayed, receiver = number, other, rank
        if best >= max(min_rows, 1):
            move(relayed, receiver, best)
            move(expert, relayed // local, best)
        else:
            blocked.add(expert)


def divide(counts: np.ndarray, rows: list[int], places: list[dict[int, int]], num_places: int) -> Plan:
    """Divides each source's rows among the instances of their expert, those at the source itself first."""
    ranks, experts = counts.shape
    local = experts // ranks
    physical: list[tuple[int, int]] = []  # expert, rows
    for rank in range(ranks):
        home = range(rank * local, rank * local + local)
        physical += [(expert, rows[expert]) for expert in home]
        used = sorted(places[rank].items())
        physical += used + [(-1, 0)] * (num_places - len(used))
    order = sorted(range(len(physical)), key=lambda p: (physical[p][0] % (experts + 1), p))  # -1 last
    per_rank = local + num_places
    sends = np.zeros((ranks, len(physical)), int)
    for expert in range(experts):
        instances = [p for p in order if physical[p][0] == expert]
        quota = {p: physical[p][1] for p in instances}
        left = counts[:, expert].astype(int).tolist()
        for p in instances:
            at_source = min(left[p // per_rank], quota[p])
            sends[p // per_rank, p] += at_source
            left[p // per_rank] -= at_source
            quota[p] -= at_source
        for source in range(ranks):
            for p in instances:
                number = min(left[source], quota[p])
                sends[source, p] += number
                left[source] -= number
                quota[p] -= number
    ends = np.cumsum(sends[:, order], axis=1)
    as_int = lambda array: np.asarray(array, np.int32)
    return Plan(*map(as_int, ([e for e, _ in physical], [n for _, n in physical], order, ends)))
