"""Streams of many clients in simulated time: who waits for whom, and for how long."""

import random
from collections import defaultdict

import pytest
from tests.support.simulation import Simulation

from charonia.server.scheduling.api import EMPTY_ROW, Run, Submit
from charonia.server.scheduling.recorded import RecordedScheduler
from charonia.server.sequences.api import SequenceMember, SequencePolicy
from charonia.server.sequences.scheduler import Sequencer

MS = 1_000_000


class Streams:
    """Clients that send a stream each, piece by piece, at a fixed pace; a new stream follows the last.

    Args:
        policy: The sequencer's policy.
        clients: Number of clients.
        pieces: Pieces of each stream.
        streams: Streams of each client.
        pace_ns: Time from one answer to the next piece.
        instances: Instances of the model.
        lost: Every so many streams a client leaves without ending it, 0 for none.
        seed: Makes the pace of each piece random, None for a steady one.
    """

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
