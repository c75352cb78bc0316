from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from charonia.server.lifecycle.repository.scan import Changes, ModelFolder, Scan, Watch, diff

Look = dict[str, str]


def seen(look: Look) -> Scan:
    """A look at one repository: fingerprint by model name."""
    return Scan(
        models={name: ModelFolder(name, Path("/r"), Path("/r") / name, print_) for name, print_ in look.items()}
    )


def watch_of(look: Look) -> Watch:
    watch = Watch()
    watch.reset(seen(look))
    return watch


def test_the_difference_of_two_looks_names_what_came_changed_and_went() -> None:
    changes = diff({"same": 1, "touched": 1, "gone": 1}, {"same": 1, "touched": 2, "new": 1})

    assert changes == Changes(added=("new",), modified=("touched",), removed=("gone",))
    assert changes
    assert not diff({"same": 1}, {"same": 1})


def test_a_change_is_acted_on_at_the_second_look_that_shows_it_and_only_once() -> None:
    watch = watch_of({"bert": "v1"})

    assert watch.changes(seen({"bert": "v2"})) == Changes()
    assert watch.is_pending
    assert watch.changes(seen({"bert": "v2"})) == Changes(modified=("bert",))
    assert not watch.is_pending
    assert watch.changes(seen({"bert": "v2"})) == Changes()


def test_a_model_that_is_being_copied_is_left_alone_until_it_stands_still() -> None:
    watch = watch_of({})

    assert not watch.changes(seen({"big": "1 byte"}))
    assert not watch.changes(seen({"big": "2 bytes"}))
    assert not watch.changes(seen({"big": "3 bytes"}))
    assert watch.changes(seen({"big": "3 bytes"})) == Changes(added=("big",))


def test_a_long_copy_does_not_hold_up_another_model() -> None:
    watch = watch_of({})

    watch.changes(seen({"big": "1 byte", "small": "s"}))

    assert watch.changes(seen({"big": "2 bytes", "small": "s"})) == Changes(added=("small",))


def test_a_model_that_vanishes_for_one_look_is_not_removed() -> None:
    watch = watch_of({"bert": "v1"})

    assert not watch.changes(seen({}))
    assert not watch.changes(seen({"bert": "v1"}))
    assert not watch.changes(seen({}))
    assert watch.changes(seen({})) == Changes(removed=("bert",))


def test_a_name_that_a_second_repository_offers_too_is_a_modified_model() -> None:
    watch = watch_of({"bert": "v1"})
    both = Scan(ambiguous={"bert": ("/r/bert", "/s/bert")})

    watch.changes(both)

    assert watch.changes(both) == Changes(modified=("bert",))


LOOKS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("12"))


@given(start=LOOKS, looks=st.lists(LOOKS, max_size=8), final=LOOKS)
def test_acting_on_settled_changes_always_arrives_at_what_is_on_disk(
    start: Look, looks: list[Look], final: Look
) -> None:
    watch, served = watch_of(start), dict(start)

    for look in [*looks, final, final]:
        changes = watch.changes(seen(look))
        for name in changes.removed:
            del served[name]
        served.update({name: look[name] for name in (*changes.added, *changes.modified)})

    assert served == final
    assert not watch.is_pending
