"""Reads estimators from files: those of skops and CatBoost, and pickles where the model is trusted.

A pickle runs code when it is read. A file of skops names the types that it makes; those that skops does not know as
harmless are made only where they are trusted by name. The trees of forests are among them: whoever writes such a file
can have them read beyond their memory.
"""

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import sklearn
from sklearn.exceptions import InconsistentVersionWarning, NotFittedError
from sklearn.utils.validation import check_is_fitted

from charonia.core.errors import ServingError, invalid, unsupported
from charonia.install_hint import extra_hint, package_hint
from charonia.server.backends.sklearn.trust import CATBOOST, Trust, check_trust

ERROR_CHARS_MAX = 500
"""Longest text of a library's error that is repeated."""

_reading = threading.Lock()
"""Warnings are caught for the whole process."""


def read_estimator(path: Path, trust: Trust) -> tuple[Any, list[str]]:
    """Return the estimator in a file, and a sentence for each thing to warn of.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read or holds something else, UNSUPPORTED for one that is
            not trusted.
    """
    if path.suffix.lower() == CATBOOST:
        return _read_catboost(path), []
    is_skops = check_trust(path, trust)
    with _reading, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", InconsistentVersionWarning)
        try:
            estimator = _read_skops(path, trust) if is_skops else joblib.load(path)
        except ServingError:
            raise
        except MemoryError:
            raise
        except Exception as error:  # what a file holds decides what it raises
            raise _unreadable(path, error, list(_versions(path, caught))) from error
    _check_estimator(path, estimator)
    return estimator, list(_versions(path, caught))


def plain_text(error: BaseException) -> str:
    """Return the message of an error as one line."""
    text = " ".join(str(error).split())[:ERROR_CHARS_MAX]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _read_catboost(path: Path) -> Any:
    """Return the model in a file of CatBoost, as a classifier where it has classes."""
    try:
        import catboost
    except ModuleNotFoundError as error:
        raise unsupported(
            f"{path.name} needs the package 'catboost', which is not installed", hint=package_hint("catboost")
        ) from error
    try:
        model = catboost.CatBoost().load_model(path)
        kind = catboost.CatBoostClassifier if len(model.classes_) else catboost.CatBoostRegressor
        return kind().load_model(path)
    except catboost.CatBoostError as error:
        raise invalid(f"cannot read {path.name}: {plain_text(error)}", hint="was it copied as a whole?") from error


def _read_skops(path: Path, trust: Trust) -> Any:
    try:
        import skops.io  # it imports all of scikit-learn, which pickles can do without
    except ModuleNotFoundError as error:
        raise unsupported(
            f"{path.name} needs the package 'skops', which is not installed", hint=extra_hint("sklearn")
        ) from error

    unknown = skops.io.get_untrusted_types(file=path)
    refused = [] if trust.is_full else sorted(set(unknown) - set(trust.types))
    if refused:
        names = ",".join(refused)
        raise unsupported(
            f"{path.name} makes objects of types that are not trusted: {', '.join(refused)}",
            hint=trust.types_hint.replace("{types}", names),
        )
    return skops.io.load(path, trusted=sorted(unknown))


def _versions(path: Path, caught: list[warnings.WarningMessage]) -> Iterator[str]:
    """Yield a sentence if a file was written with another version of scikit-learn."""
    found = {
        message.message.original_sklearn_version
        for message in caught
        if isinstance(message.message, InconsistentVersionWarning)
    }
    if found:
        versions = ", ".join(sorted(found))
        yield (
            f"{path.name} was written with scikit-learn {versions}, and this is {sklearn.__version__}: answers may "
            f"differ; install scikit-learn=={min(found)}, or write it again"
        )


def _unreadable(path: Path, error: Exception, versions: list[str]) -> ServingError:
    hint = versions[0] if versions else ""
    if isinstance(error, ModuleNotFoundError):
        hint = f"it needs the package that has '{error.name}': install it where the server runs"
    elif isinstance(error, AttributeError) and "__main__" in str(error):
        hint = (
            "a function or class of the script that wrote it is missing: move it into a module that is installed here"
        )
    elif not hint:
        hint = f"was it copied as a whole, and written by skops or joblib? scikit-learn here is {sklearn.__version__}"
    return invalid(f"cannot read {path.name}: {plain_text(error)}", hint=hint)


def _check_estimator(path: Path, estimator: Any) -> None:
    kind = type(estimator).__name__
    if not (hasattr(estimator, "predict") or hasattr(estimator, "transform")):
        raise invalid(
            f"{path.name} holds an object of type {kind}, expected an estimator with `predict` or `transform`",
            hint="write the estimator or the pipeline itself",
        )
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise invalid(f"{path.name}: the {kind} has not been fitted", hint="call fit before you write it") from None
    except TypeError:
        pass  # an estimator of another package, which says so itself when it is called
