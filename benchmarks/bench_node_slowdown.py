"""A slowdown that the processes of a node share, beside one that each has of its own: a store that bears a part.

Run: ``python benchmarks/bench_node_slowdown.py``. Plays the rule of ``storage/requests/throttle.py`` in virtual time:
answers take 50 ms, refusals 5 ms, each process looks at what it shares ten times a second. Counts the last three
quarters of two minutes. Behind docs/design/0021-deletions.md.
"""

from __future__ import annotations

import heapq
import random

from streaming.storage.requests.throttle import GIVEN_BACK, Slowdown

SECONDS, ANSWER_S, REFUSAL_S, LOOK_S = 120.0, 0.05, 0.005, 0.1
CASES = ((8, 16, 0.5), (8, 16, 0.25), (8, 16, 0.9), (8, 64, 0.25), (2, 64, 0.5), (8, 4, 0.5), (16, 32, 0.1))


class Process:
    """Sends as many requests at once as its slowdown allows of those that it wants."""

    def __init__(self, wanted: int, state: list[Slowdown]) -> None:
        self.wanted = wanted
        self.state = state
        self.seen = Slowdown()
        self.looked_s, self.given_back, self.under_way = -1.0, 0.0, 0

    def share(self, now_s: float) -> float:
        if now_s - self.looked_s >= LOOK_S:
            self.looked_s = now_s
            if self.given_back:
                self.change(now_s, None)
            self.seen = self.state[0]
        return min(1.0, self.seen.share_at(now_s) + self.given_back)

    def change(self, now_s: float, sent_at: float | None) -> None:
        self.seen = self.state[0] = self.state[0].after(now_s, self.given_back, sent_at)
        self.given_back = 0.0


def play(num_processes: int, wanted: int, bears: int, *, shared: bool, seed: int) -> tuple[float, float]:
    """Answers as a share of what the store bears, and refusals as a share of all requests."""
    dice = random.Random(seed)
    one = [Slowdown()]
    processes = [Process(wanted, one if shared else [Slowdown()]) for _ in range(num_processes)]
    events = [(dice.random() * 0.01, number, "begins", 0.0) for number in range(num_processes)]
    heapq.heapify(events)
    at_store = answered = refused = 0
    while events[0][0] <= SECONDS:
        now_s, number, what, sent_at = heapq.heappop(events)
        process = processes[number]
        counts = now_s > SECONDS / 4
        if what != "begins":
            process.under_way -= 1
        if what == "answer":
            at_store -= 1
            answered += counts
            if process.share(now_s) < 1:
                process.given_back += GIVEN_BACK
        elif what == "refusal":
            refused += counts
            process.change(now_s, sent_at)
        share = process.share(now_s)
        while process.under_way < (wanted if share >= 1 else max(1, int(wanted * share))):
            process.under_way += 1
            takes = at_store < bears
            at_store += takes
            duration_s = (ANSWER_S if takes else REFUSAL_S) * dice.uniform(0.5, 1.5)
            heapq.heappush(events, (now_s + duration_s, number, "answer" if takes else "refusal", share))
    return answered / (bears / ANSWER_S * SECONDS * 0.75), refused / (answered + refused)


def main() -> None:
    """Print a line for each case, means of three seeds."""
    for num_processes, wanted, part in CASES:
        bears = int(num_processes * wanted * part)
        line = f"{num_processes} processes x {wanted} requests, the store bears {bears}:"
        for shared in (False, True):
            played = [play(num_processes, wanted, bears, shared=shared, seed=seed) for seed in range(3)]
            answers, refusals = (100 * sum(column) / 3 for column in zip(*played, strict=True))
            line += f" {'shared' if shared else 'own'} {answers:.1f} % answered, {refusals:.2f} % refused;"
        print(line.rstrip(";"))


if __name__ == "__main__":
    main()
