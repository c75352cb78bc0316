"""The kinds of tasks of the registry."""

ADD = "model.add"
"""Brings the files of a version and checks it."""

CHECK = "model.check"
"""Checks a version again."""

COLLECT = "artifacts.collect"
"""Removes the files that no version has, and uploads that nobody has finished."""
