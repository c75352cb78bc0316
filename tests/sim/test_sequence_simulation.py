"""Streams of many clients in simulated time: who waits for whom, and for how long."""

import random
from collections import defaultdict

import pytest
from tests.support.recorded import RecordedScheduler
from tests.support.simulation import Simulation

from charonia.server.scheduling.api import EMPTY_ROW, Cancel, DropReason, Run, Submit
from charonia.server.sequences.api import SequenceMember, SequencePolicy
from charonia.server.sequences.scheduler import Sequencer

MS = 1_000_000


class Streams:
    """Clients that send a stream each, piece by piece, at a fixed pace; a new stream follows the last."""

    def __init__(
        self,
        policy: SequencePolicy,
        *,
        clients: int,
        pieces: int = 20,
        streams: int = 3,
        pace_ns: int = 4 * MS,
        instances: int = 1,
        lost: int = 0,
        seed: int | None = None,
    ) -> None:
        self.sequencer = Sequencer(policy, instances)
        self.pieces, self.streams, self.pace_ns, self.lost = pieces, streams, pace_ns, lost
        self.random = random.Random(seed) if seed is not None else None
        self.of: dict[int, tuple[int, int, int]] = {}  # client, stream and piece by which
        self.begun_ns: dict[tuple[int, int], int] = {}
        self.sim = Simulation(RecordedScheduler(self.sequencer), _service_ns, slots=instances, on_left=self._left)
        for client in range(clients):
            self._plan(client * 100_000, client, 0, 0)
        self.sim.run()

    def _plan(self, at_ns: int, client: int, stream: int, piece: int) -> None:
        which = len(self.of) + 1
        self.of[which] = (client, stream, piece)
        part = SequenceMember(f"{client}/{stream}", piece == 0, piece == self.pieces - 1)
        if piece == 0:
            self.begun_ns[client, stream] = at_ns
        self.sim.at(at_ns, Submit(which, 1, part))

    def _left(self, which: int, now_ns: int) -> None:
        if which == EMPTY_ROW:
            return
        client, stream, piece = self.of[which]
        number = client * self.streams + stream + 1
        next_ns = now_ns + self.pace_ns
        if self.random is not None:
            next_ns = now_ns + self.random.randrange(2 * self.pace_ns)
        if piece + 1 < self.pieces and not (self.lost and number % self.lost == 0 and piece == self.pieces // 2):
            self._plan(next_ns, client, stream, piece + 1)
        elif stream + 1 < self.streams:
            self._plan(next_ns, client, stream + 1, 0)

    def check(self) -> None:
        """Check that every request ran once, in the order of its stream, in one place; and that nothing is left."""
        assert not self.sim.dropped
        assert set(self.sim.finished_ns) - {EMPTY_ROW} == set(self.of)
        ran = [which for _, run in self.sim.runs for which in run.ids if which != EMPTY_ROW]
        assert len(ran) == len(set(ran))
        places = defaultdict(set)
        pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
        for _, run in self.sim.runs:
            for row, which in enumerate(run.ids):
                if which != EMPTY_ROW:
                    client, stream, piece = self.of[which]
                    pieces[client, stream].append(piece)
                    places[client, stream].add((run.slot, row))
        assert all(found == sorted(found) for found in pieces.values())
        assert all(len({slot for slot, _ in found}) == 1 for found in places.values())
        if self.sequencer._policy.keeps_rows:
            assert all(len(found) == 1 for found in places.values())
        assert (self.sequencer.live, self.sequencer.queued) == (0, 0)

    def waits_ns(self) -> list[int]:
        """How long each stream waited for its first piece to run, in the order in which they began."""
        first = {
            self.of[which][:2]: at for which, at in self.sim.started_ns.items() if which and self.of[which][2] == 0
        }
        return [first[key] - at for key, at in sorted(self.begun_ns.items(), key=lambda item: item[1])]


def _service_ns(run: Run) -> int:
    return MS + len(run.ids) * MS // 20


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize(("lost", "seed"), [(0, None), (0, 1), (4, 2), (3, 3)])
def test_every_piece_of_every_stream_runs_in_its_place(
    keeps_rows: bool, instances: int, lost: int, seed: int | None
) -> None:
    policy = SequencePolicy(idle_ns=50 * MS, rows=8, size_max=8, keeps_rows=keeps_rows)

    streams = Streams(policy, clients=40, instances=instances, lost=lost, seed=seed)

    streams.check()


def test_streams_share_batches() -> None:
    streams = Streams(SequencePolicy(1000 * MS, rows=64, size_max=16, keeps_rows=False), clients=32)

    streams.check()
    sizes = [len(run.ids) for _, run in streams.sim.runs]
    assert sum(sizes) / len(sizes) > 6


def test_streams_in_the_backlog_get_slots_in_the_order_in_which_they_began() -> None:
    streams = Streams(SequencePolicy(1000 * MS, rows=4, size_max=4), clients=16, streams=2)

    streams.check()
    started = sorted(
        (at, *streams.of[which][:2])
        for which, at in streams.sim.started_ns.items()
        if which and not streams.of[which][2]
    )
    begun = sorted((at, *key) for key, at in streams.begun_ns.items())
    assert [entry[1:] for entry in started] == [entry[1:] for entry in begun]
    waits = streams.waits_ns()
    assert waits[0] == 0
    assert max(waits) < 5 * streams.pieces * (streams.pace_ns + 2 * MS)


def test_a_lost_stream_costs_others_no_more_than_the_idle_time() -> None:
    idle_ns = 100 * MS
    policy = SequencePolicy(idle_ns, rows=1)
    alone = Streams(policy, clients=2, streams=1)
    with_loss = Streams(policy, clients=2, streams=1, lost=1)

    alone.check()
    with_loss.check()
    half = alone.pieces // 2
    last_ns = max(at for which, at in with_loss.sim.finished_ns.items() if with_loss.of[which] == (0, 0, half))
    assert with_loss.waits_ns()[1] == last_ns + idle_ns - 100_000


def test_the_same_simulation_is_the_same_twice() -> None:
    policy = SequencePolicy(50 * MS, rows=8, size_max=8, delay_ns=2 * MS, utilization_min=0.5)

    first, second = (Streams(policy, clients=20, lost=5, seed=9) for _ in range(2))

    first.check()
    assert first.sim.runs == second.sim.runs


class Sessions:
    """Clients that come at random, begin a sequence, and leave if its first answer takes longer than they wait."""

    PIECES, PACE_NS, ROWS = 10, 10 * MS, 4

    def __init__(self, per_s: float, patience_ns: int, *, adapts: bool, seconds: int = 10) -> None:
        self.end_ns = seconds * 1000 * MS
        policy = SequencePolicy(1000 * MS, rows=self.ROWS, size_max=self.ROWS, keeps_rows=False, adapts=adapts)
        self.sim = Simulation(Sequencer(policy, 1), _service_ns, on_left=self._left)
        self.of: dict[int, tuple[int, int]] = {}  # client and piece by request
        self.begun_ns: dict[int, int] = {}
        self.done: dict[int, int] = {}  # when the last answer came, by client
        self._patience_ns = patience_ns
        chance, time_ns = random.Random(7), 0
        while (time_ns := time_ns + round(chance.expovariate(per_s) * 1000 * MS)) < self.end_ns:
            self.begun_ns[len(self.begun_ns)] = time_ns
            first = self._plan(time_ns, len(self.begun_ns) - 1, 0)
            if patience_ns:
                self.sim.at(time_ns + patience_ns, Cancel(first))
        self.sim.run()

    def _plan(self, at_ns: int, client: int, piece: int) -> int:
        which = len(self.of) + 1
        self.of[which] = client, piece
        self.sim.at(at_ns, Submit(which, 1, SequenceMember(client + 1, piece == 0, piece == self.PIECES - 1)))
        return which

    def _left(self, which: int, now_ns: int) -> None:
        client, piece = self.of[which]
        late = piece == 0 and self._patience_ns and now_ns - self.begun_ns[client] > self._patience_ns
        if which in self.sim.dropped or late:
            return
        if piece + 1 < self.PIECES:
            self._plan(now_ns + self.PACE_NS, client, piece + 1)
        else:
            self.done[client] = now_ns

    def finished(self) -> int:
        """How many sequences came to their end in the last five seconds of arrivals."""
        return sum(self.end_ns - 5000 * MS <= at < self.end_ns for at in self.done.values())

    def first_waits_ns(self) -> list[int]:
        """How long the first pieces of the later clients that were served waited, ascending."""
        starts = self.sim.started_ns
        return sorted(
            starts[which] - self.begun_ns[client]
            for which, (client, piece) in self.of.items()
            if piece == 0 and which in starts and self.begun_ns[client] >= self.end_ns - 5000 * MS
        )


def test_under_overload_new_sequences_are_refused_and_the_others_come_to_their_end() -> None:
    # A sequence takes 101 ms at least: four slots do 40 of them in a second.
    patience_ns = 1000 * MS
    plain = Sessions(200, patience_ns, adapts=False)
    adapted = Sessions(200, patience_ns, adapts=True)

    refused = {which for which, (_, why) in adapted.sim.dropped.items() if why is DropReason.OVERLOADED}
    assert refused
    assert {adapted.of[which][1] for which in refused} == {0}
    assert adapted.finished() >= 0.9 * 5 * 36
    assert adapted.finished() > plain.finished()
    waits = adapted.first_waits_ns()
    assert waits[len(waits) * 99 // 100] <= 0.75 * patience_ns


def test_patient_clients_of_sequences_lose_nothing() -> None:
    sessions = Sessions(200, 0, adapts=True, seconds=2)

    assert not sessions.sim.dropped
    assert len(sessions.done) == len(sessions.begun_ns)


def test_without_overload_no_sequence_is_refused() -> None:
    sessions = Sessions(20, 1000 * MS, adapts=True)

    assert DropReason.OVERLOADED not in {why for _, why in sessions.sim.dropped.values()}
