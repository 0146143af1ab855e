"""What a generation gives: tokens while it runs, and its summary."""

from dataclasses import dataclass

from mkdeploy.bindings import signatures as c
from mkdeploy.errors import UsageError

STOP_NAMES = {c.Stop.MKD_STOP_LENGTH: "length", c.Stop.MKD_STOP_EOG: "eog", c.Stop.MKD_STOP_STRING: "string"}
STOP_NAMES |= {c.Stop.MKD_STOP_CONTEXT: "context", c.Stop.MKD_STOP_INTERRUPTED: "interrupted"}


@dataclass(frozen=True)
class Token:
    """One generated token; `text` is whole characters only (maybe empty), `t_us` on the monotonic clock.

    id -1 brings no token: it is the end of the text, which had been held back as a possible stop string.
    """

    id: int
    text: str
    t_us: int


@dataclass(frozen=True)
class Generated:
    """What `generate` made. `stop` is length, eog, string, context or interrupted; times in microseconds."""

    text: str
    tokens: tuple[int, ...]
    stop: str
    n_prompt: int
    n_cached: int
    n_generated: int
    seed: int
    prompt_us: int
    generate_us: int


def check_request(n_predict: int, seed: int | None) -> None:
    """Refuses numbers that the C API's 32 bits would cut."""
    if not -1 <= n_predict < 2**31:
        raise UsageError(f"n_predict is {n_predict}; expected 0 to {2**31 - 1}, or -1 for no limit")
    if seed is not None and not -1 <= seed < 2**32:
        raise UsageError(f"the seed is {seed}; expected 0 to {2**32 - 1}, or -1 for a random one")
