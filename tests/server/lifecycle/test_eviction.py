"""Which models make room for another, and when one that failed is tried again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.lifecycle.eviction import (
    BACK_OFF_NS,
    BACK_OFF_NS_MAX,
    BackOff,
    EvictionPlan,
    Fit,
    Resident,
    make_room,
)


def test_there_is_room_without_anybody_leaving() -> None:
    assert make_room({"a": Resident(3, 1)}, budget=10, needed=7) == EvictionPlan(Fit.FITS)


def test_the_least_recently_used_leave_and_no_more_than_needed() -> None:
    residents = {"new": Resident(4, 30), "old": Resident(4, 10), "middle": Resident(4, 20)}

    assert make_room(residents, budget=12, needed=4) == EvictionPlan(Fit.FITS, ("old",))
    assert make_room(residents, budget=12, needed=5) == EvictionPlan(Fit.FITS, ("old", "middle"))


def test_models_in_flight_stay_and_are_waited_for() -> None:
    residents = {"busy": Resident(8, 1, is_busy=True), "idle": Resident(2, 2)}

    assert make_room(residents, budget=10, needed=2) == EvictionPlan(Fit.FITS, ("idle",))
    assert make_room(residents, budget=10, needed=3) == EvictionPlan(Fit.LATER)


def test_what_cannot_fit_beside_what_stays_never_fits() -> None:
    residents = {"pinned": Resident(4, 1, is_pinned=True), "held": Resident(4, 2), "idle": Resident(2, 3)}

    assert make_room(residents, budget=10, needed=2, held={"held"}) == EvictionPlan(Fit.FITS, ("idle",), 8)
    assert make_room(residents, budget=10, needed=3, held={"held"}) == EvictionPlan(Fit.NEVER, stays=8)
    assert make_room(residents, budget=10, needed=3) == EvictionPlan(Fit.FITS, ("held",), 4)
    assert make_room({}, budget=10, needed=11) == EvictionPlan(Fit.NEVER)


def test_an_ensemble_leaves_before_what_it_is_made_of() -> None:
    residents = {
        "step": Resident(5, 1),
        "inner": Resident(0, 9, made_of=("step",)),
        "outer": Resident(0, 9, made_of=("inner", "other")),
        "other": Resident(5, 2),
    }

    assert make_room(residents, budget=10, needed=5) == EvictionPlan(Fit.FITS, ("outer", "inner", "step"))


def test_the_parts_of_an_ensemble_in_flight_or_pinned_stay() -> None:
    busy = {"step": Resident(5, 1), "ensemble": Resident(0, 2, is_busy=True, made_of=("step", "gone"))}
    pinned = {"step": Resident(5, 1), "ensemble": Resident(0, 2, is_pinned=True, made_of=("step",))}

    assert make_room(busy, budget=5, needed=1) == EvictionPlan(Fit.LATER)
    assert make_room(pinned, budget=5, needed=1) == EvictionPlan(Fit.NEVER, stays=5)


def test_what_takes_nothing_is_not_unloaded_for_nothing() -> None:
    residents = {"empty": Resident(0, 1), "full": Resident(5, 2)}

    assert make_room(residents, budget=5, needed=5).evict == ("full",)


def test_a_part_of_two_that_leave_is_counted_once() -> None:
    residents = {
        "a": Resident(1, 1, made_of=("x",)),
        "x": Resident(3, 2),
        "y": Resident(3, 3),
    }

    assert make_room(residents, budget=7, needed=4) == EvictionPlan(Fit.FITS, ("a", "x"))


NAMES = "abcdef"
RESIDENTS = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(
        Resident,
        st.integers(0, 20),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
        st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
    ),
)


@settings(max_examples=300, deadline=None)
@given(RESIDENTS, st.integers(0, 60), st.integers(0, 40), st.sets(st.sampled_from(NAMES), max_size=2))
def test_no_rule_is_ever_broken(residents: dict[str, Resident], budget: int, needed: int, held: set[str]) -> None:
    room = make_room(residents, budget, needed, held=held)

    assert len(set(room.evict)) == len(room.evict)
    for key in room.evict:
        resident = residents[key]
        assert not resident.is_busy
        assert not resident.is_pinned
        assert key not in held
    left = {key: resident for key, resident in residents.items() if key not in room.evict}
    assert not any(part in room.evict for resident in left.values() for part in resident.made_of)
    size = sum(resident.size for resident in left.values())
    if room.verdict is Fit.FITS:
        assert size + needed <= budget
    else:
        assert room.evict == ()
    if room.verdict is Fit.NEVER:
        assert room.stays + needed > budget


def test_a_model_that_failed_is_left_alone_for_longer_and_longer() -> None:
    back_off = BackOff()
    now, pauses = 0, []
    for _ in range(10):
        back_off.failed("m", "no", "v1", now)
        found = back_off.reason("m", "v1", now)
        assert found is not None
        pauses.append(found[1])
        now += found[1]
        assert back_off.reason("m", "v1", now) is None

    assert pauses[:3] == [BACK_OFF_NS, 2 * BACK_OFF_NS, 4 * BACK_OFF_NS]
    assert pauses[-1] == BACK_OFF_NS_MAX


def test_other_files_are_tried_at_once_and_a_success_forgets() -> None:
    back_off = BackOff()
    back_off.failed("m", "no", "v1", 0)

    assert back_off.reason("m", "v2", 1) is None
    back_off.failed("m", "no", "v2", 1)
    assert back_off.reason("m", "v2", 1) is not None
    back_off.loaded("m")
    back_off.loaded("m")
    assert back_off.reason("m", "v2", 1) is None


def test_failures_of_models_that_are_gone_are_forgotten() -> None:
    back_off = BackOff()
    back_off.failed("m", "no", None, 0)
    back_off.failed("n", "no", None, 0)

    back_off.keep({"n"})

    assert back_off.reason("m", None, 0) is None
    assert back_off.reason("n", None, 0) is not None
