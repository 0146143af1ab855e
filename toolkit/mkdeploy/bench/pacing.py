"""Waits for a phone to cool before each repetition, and looks at it before and after.

Job: the pacer of `bench --serial`. Choice: a phone that does not cool in time is measured anyway, with a note and with
`is_cool` false in its record: a run that ends without numbers helps nobody. Clock and sleep are arguments, so that
tests need neither. What it does not do: talk to the phone (`snapshot` does).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

POLL_S = 2.0
DEFAULT_TIMEOUT_S = 300.0


class CoolingPacer:
    """Holds repetitions until the hottest thermal zone is cool enough.

    Args:
        snapshot: the phone's state as plain values; `hottest_c` is its hottest zone in °C, None if none can be read.
        cool_to_c: begin at this temperature or below; None: at once.
        timeout_s: go on after this long, whatever the temperature.
        say: receives notes for people.
        sleep, clock: seconds.
    """

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        *,
        cool_to_c: float | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        say: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot, self._cool_to_c, self._timeout_s = snapshot, cool_to_c, timeout_s
        self._say, self._sleep, self._clock = say, sleep, clock

    def before(self) -> Mapping[str, Any]:
        """Blocks until the phone is cool, the time is over, or no temperature can be read."""
        began, is_told = self._clock(), False
        while True:
            state = dict(self._snapshot())
            waited_s = self._clock() - began
            if self._cool_to_c is None:
                return state
            hottest = state.get("hottest_c")
            if hottest is None:
                self._say("no thermal zone can be read: --cool-to has no effect")
                return state | {"is_cool": None, "waited_s": waited_s}
            if hottest <= self._cool_to_c or waited_s >= self._timeout_s:
                is_cool = hottest <= self._cool_to_c
                if not is_cool:
                    self._say(
                        f"the phone is at {hottest:.1f} °C after {waited_s:.0f} s of waiting for"
                        f" {self._cool_to_c:g} °C; it is measured as it is"
                    )
                return state | {"is_cool": is_cool, "waited_s": waited_s}
            if not is_told:
                self._say(f"waiting for {self._cool_to_c:g} °C; the hottest zone has {hottest:.1f} °C")
                is_told = True
            self._sleep(min(POLL_S, max(self._timeout_s - waited_s, 0.01)))

    def after(self) -> Mapping[str, Any]:
        """The state right after a repetition."""
        return self._snapshot()
