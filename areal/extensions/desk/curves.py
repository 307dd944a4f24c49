"""What the pictures of a run have in common: the meaning of colours, smoothed curves, and axes that show all values.

The report draws with it. The web pages take the colours from here, and plots.js smooths and limits by the same rules.
"""

import math
from collections.abc import Sequence

import numpy as np

from areal.extensions.desk.timeline import WAITING, WEIGHTS, WORK

COLOURS = {
    WORK: "#3b82d6",  # training, generating, scoring, evaluating; also the first line of a plot
    WEIGHTS: "#e07b28",  # taking, writing, publishing and loading them
    WAITING: "#9a9a9a",
    "held_out": "#2e9e6b",  # what is measured on held-out rows
    "second": "#9b59d0",  # the second line of a plot
}
# The colour scale from the freshest to the oldest groups. Without a light middle, neighbours could not be told apart.
SCALE = ((0x3B, 0x82, 0xD6), (0xF2, 0xC5, 0x4B), (0xC4, 0x2E, 0x5B))
# A curve is smoothed over one in this many of its points, to either side: with less points it is not.
SMOOTHED_FROM = 20
# Values above this multiple of the 90th percentile are cut off: the first step includes the start of generation.
OUTLIER = 2.5
# The part of a logarithmic axis that belongs to zero ends here, if no value is positive.
SMALLEST = 1e-7


def smoothed(values: Sequence[float]) -> list[float]:
    """At each place the mean of the values around it, as many before as after except at the ends. Less than
    SMOOTHED_FROM values stay as they are."""
    window = np.ones(2 * (len(values) // SMOOTHED_FROM) + 1)
    if len(window) == 1:
        return list(values)
    return list(np.convolve(values, window, mode="same") / np.convolve(np.ones(len(values)), window, mode="same"))


def upper_limit(values: Sequence[float]) -> float | None:
    """The end of an axis from 0 that cuts off outliers, a tenth of `values` at most; None if there are none."""
    ordered = sorted(filter(math.isfinite, values))
    if not ordered:
        return None
    usual = OUTLIER * ordered[int(0.9 * (len(ordered) - 1))]
    return None if ordered[-1] <= usual or not usual else 1.2 * max(value for value in ordered if value <= usual)


def linear_below(values: Sequence[float]) -> float:
    """The power of ten below all positive values: where a logarithmic axis with zeros becomes linear."""
    smallest = min((value for value in values if value > 0 and math.isfinite(value)), default=SMALLEST)
    return 10.0 ** math.floor(math.log10(smallest))


def ramp(n: int) -> list[str]:
    """`n` colours from the first of SCALE to its last."""
    places, at = np.linspace(0, len(SCALE) - 1, n), range(len(SCALE))
    colours = np.stack([np.interp(places, at, part) for part in zip(*SCALE, strict=True)], axis=1).round().astype(int)
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in colours.tolist()]
