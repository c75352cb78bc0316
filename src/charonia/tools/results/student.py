"""Quantiles of Student's t-distribution. Pure."""

import math
from functools import lru_cache
from statistics import NormalDist


@lru_cache(maxsize=1024)
def student(confidence: float, freedom: float = math.inf) -> float:
    """Return the half-width of a confidence interval in standard errors.

    Source: Abramowitz and Stegun, 26.7.5, within 1 % from 3 degrees of freedom on and within 0.1 % from 9 on; closed
    forms for 1 and 2.

    Args:
        confidence: Confidence level of the interval.
        freedom: Degrees of freedom; infinite for the normal distribution.
    """
    if freedom == 1:
        return math.tan(math.pi / 2 * confidence)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
