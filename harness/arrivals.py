"""When sessions of an open loop start: instants on an absolute time line, drawn before anything is sent.

Pure. A process with gaps of mean 1 is drawn first and then laid onto the curve of the asked rate, so a ramp or another
stage stretches the same draws and the number of starts in a stage is what its rate says. Constant gaps begin at 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from harness.drive import Drive


def arrivals_us(drive: Drive, rng: random.Random) -> Iterator[int]:
    """Instants in order, microseconds from the start of the load; ends with the last stage, else never."""
    curve = RateCurve(drive)
    for mass in _masses(drive, rng):
        at_s = curve.reaches_s(mass)
        if at_s is None:
            return
        yield round(at_s * 1e6)


def _masses(drive: Drive, rng: random.Random) -> Iterator[float]:
    """The same instants as they would be at one start a second."""
    mass = 0.0
    if drive.arrival == "constant":
        while True:
            yield mass
            mass += 1.0
    shape = drive.burstiness
    while True:
        mass += -math.log(1.0 - rng.random()) if shape == 1.0 else rng.gammavariate(shape, 1.0 / shape)
        yield mass


class RateCurve:
    """The asked rate over time: a ramp from 0, then constant pieces; `reaches_s` inverts its integral."""

    def __init__(self, drive: Drive) -> None:
        pieces = [(stage.rate_per_s, stage.duration_s) for stage in drive.stages]
        if not pieces:
            pieces = [(drive.rate_per_s or 0.0, math.inf)]
        self._ramp_s = drive.ramp_s
        first_rate, first_s = pieces[0]
        self._ramp_rate = first_rate
        self._pieces = [(first_rate, first_s - drive.ramp_s), *pieces[1:]]

    def reaches_s(self, mass: float) -> float | None:
        """When so many starts were due; None if the curve ends before."""
        ramp_mass = self._ramp_rate * self._ramp_s / 2
        if mass < ramp_mass:
            return math.sqrt(2 * self._ramp_s * mass / self._ramp_rate)
        mass -= ramp_mass
        at_s = self._ramp_s
        for rate, length_s in self._pieces:
            if mass < rate * length_s:
                return at_s + mass / rate
            mass -= rate * length_s
            at_s += length_s
        return None
