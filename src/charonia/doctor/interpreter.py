"""How the interpreter that runs this was built: what the server does between models is Python."""

import sys
import sysconfig

DISTRIBUTION_PREFIX = "/usr"
"""Where distributions install their own interpreter, which they build with profile-guided optimisation."""

_OPTION = "--enable-optimizations"


def is_optimised(prefix: str = sys.base_prefix, arguments: str | None = None) -> bool:
    """Return whether the interpreter was built with profile-guided optimisation, as far as can be told.

    Args:
        prefix: Where it is installed.
        arguments: What its build was configured with; None for those of this interpreter.

    Source: Python's "Using Python on Unix platforms", performance options of `configure`.
    """
    if arguments is None:
        arguments = sysconfig.get_config_var("CONFIG_ARGS")
    # There are none on Windows, where the official build is optimised.
    return not arguments or _OPTION in arguments or prefix == DISTRIBUTION_PREFIX
