"""`mkdeploy run`: one prompt or a chat, streamed to the terminal.

Job: start the engine, send it text, show what comes. stdout gets the text (or one JSON object) and nothing else;
progress, the closing line and the memory table go to stderr. Choice: prompt and chat are the same thing, requests to
one `mkd-run generate --requests`; the KV cache keeps the common prefix, so a chat sends its whole text each turn.
Ctrl-C stops the answer; a second one within it ends the program. What it does not do: sampling, templates, statistics
over several runs.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import rich.console

from mkdeploy.chat import ChatTemplate, Message, Reply, chat_loop
from mkdeploy.engine.events import Done, Loaded, TokenEvent
from mkdeploy.engine.info import MemoryInfo
from mkdeploy.engine.place import Place, ThisMachine
from mkdeploy.engine.process import Engine, EngineOptions, SamplingOptions
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.model_file import metadata_file, read_text
from mkdeploy.package.verify import open_package
from mkdeploy.sizes import format_size

_HEX = re.compile(r"[0-9a-fA-F]{2}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


@dataclass(frozen=True)
class RunResult:
    """What a run made; of a dialogue its last answer, with stop "exit". `stats` has bench's keys."""

    text: str
    tokens: tuple[int, ...]
    stop: str
    stats: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"text": self.text, "tokens": list(self.tokens), "stop": self.stop, "stats": self.stats}


def unescape(text: str) -> str:
    """Reads \\n, \\r, \\t, \\', \\", \\\\ and \\xHH as llama.cpp does in prompts; anything else stays as it is."""
    out, i = [], 0
    while i < len(text):
        following = text[i + 1] if text[i] == "\\" and i + 1 < len(text) else ""
        if following in _ESCAPES and following:
            out.append(_ESCAPES[following])
            i += 2
        elif following == "x" and (digits := _HEX.match(text, i + 2)):
            out.append(chr(int(digits[0], 16)))
            i += 4
        else:
            out.append(text[i])
            i += 1
    return "".join(out)


def stats_of(done: Done, loaded: Loaded, options: EngineOptions, itl_ms: Sequence[float]) -> dict[str, Any]:
    """The numbers of one answer.

    Args:
        done: the engine's own.
        loaded: model and memory.
        options: what the engine was asked for.
        itl_ms: milliseconds between tokens.
    """
    stats, model, memory = done.stats, loaded.model, loaded.memory
    # The first token comes from the prompt's own pass: one less is decoded one by one.
    n_decoded = max(done.n_generated - 1, 0)
    n_tokens = done.n_prompt + n_decoded
    total_us = done.prompt_us + done.generate_us
    paged = model.expert_payload_bytes > 0
    p50, p90, p99 = (float(np.percentile(itl_ms, q)) for q in (50, 90, 99)) if itl_ms else (None, None, None)
    return {
        "n_prompt": done.n_prompt,
        "n_cached": done.n_cached,
        "n_gen": done.n_generated,
        "prompt_ts": 1e6 * done.n_prompt / done.prompt_us if done.prompt_us and done.n_prompt else None,
        "avg_ts": 1e6 * n_decoded / done.generate_us if done.generate_us and n_decoded else None,
        "prompt_us": done.prompt_us,
        "generate_us": done.generate_us,
        "seed": done.seed,
        "memory_budget_bytes": memory.budget_bytes,
        "memory_total_bytes": memory.total_bytes,
        "cache_slots": memory.slots_per_layer,
        "expert_bytes": model.expert_payload_bytes,
        "n_moe_layer": model.n_moe_layer,
        "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
        "flash_bytes_per_token": stats.read_bytes / n_tokens if paged and n_tokens else None,
        "cache_hit_rate": stats.hit_rate,
        "load_us_per_expert": stats.load_us_per_expert,
        "stall_us_per_token": stats.stall_us / n_tokens if paged and n_tokens else None,
        "stall_share": stats.stall_us / total_us if paged and total_us else None,
        "unique_experts_per_layer": stats.unique_experts_per_layer,
        "ttft_ms": done.prompt_us / 1000,
        "itl_ms_p50": p50,
        "itl_ms_p90": p90,
        "itl_ms_p99": p99,
        "rss_peak_bytes": done.rss_peak_bytes,
        "majflt_per_token": done.majflt / n_tokens if n_tokens else None,
        "load_ms": loaded.load.load_us / 1000,
        "policy": options.cache_policy if paged else "none",
        "prefetch": options.prefetch if paged else "off",
        "prefetch_hit_rate": stats.prefetch_hit_rate,
        "prefetch_waste_bytes": stats.prefetch_waste_bytes if paged else None,
        "engine": vars(stats),
    }


def closing_line(stats: dict[str, Any], stop: str) -> str:
    """One line for people: speed, hit rate, flash traffic, stall share, and why it ended where that is not obvious."""

    def speed(value: float | None) -> str:
        return "" if value is None else f", {value:.2f} tok/s"

    cached = f" (+{stats['n_cached']} cached)" if stats["n_cached"] else ""
    parts = [
        f"prompt {stats['n_prompt']} tokens{cached}{speed(stats['prompt_ts'])}",
        f"generated {stats['n_gen']} tokens{speed(stats['avg_ts'])}",
    ]
    if stats["cache_hit_rate"] is not None:
        parts.append(f"hit rate {100 * stats['cache_hit_rate']:.1f} %")
    if stats["flash_bytes_per_token"] is not None:
        parts.append(f"{stats['flash_bytes_per_token'] / 2**20:.2f} MiB/token from flash")
    if stats["stall_share"] is not None:
        parts.append(f"stalled {100 * stats['stall_share']:.0f} % of the time")
    ends = {"context": "the context is full: -c makes it larger", "interrupted": "interrupted"}
    if stop in ends:
        parts.append(ends[stop])
    return " · ".join(parts)


def memory_table(memory: MemoryInfo, rss_peak_bytes: int) -> str:
    """Where the memory went, one part a line."""
    slots = f"{memory.n_slots} experts, at least {memory.slots_per_layer} per layer" if memory.n_slots else ""
    rows = [
        ("resident", memory.resident_bytes, "weights that are not routed"),
        ("KV cache", memory.kv_bytes, ""),
        ("compute", memory.compute_bytes, ""),
        ("slots", memory.slots_bytes, slots),
        ("work", memory.work_bytes, ""),
        ("other", memory.other_bytes, ""),
        ("total", memory.total_bytes, f"of {format_size(memory.budget_bytes)}" if memory.budget_bytes else "no budget"),
        ("peak RSS", rss_peak_bytes, "of the engine's process"),
    ]
    lines = (f"  {name:<9}{format_size(n_bytes):>10}  {remark}".rstrip() for name, n_bytes, remark in rows)
    return "\n".join(("memory", *lines))


@contextlib.contextmanager
def _answer_stops_on_sigint(engine: Engine) -> Iterator[None]:
    """First Ctrl-C: the engine ends its answer. Second: KeyboardInterrupt. Only in the main thread.

    An engine that is hit just before it begins to work ends; that too is KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        engine.interrupt()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except MkdeployError:
        if seen:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Speaker:
    """Sends requests and shows their answers."""

    engine: Engine
    loaded: Loaded
    options: EngineOptions
    n_predict: int
    stops: tuple[str, ...]
    show: bool  # stream the text to stdout
    last: RunResult | None = None
    rss_peak_bytes: int = 0

    def say(self, text: str, *, add_special: bool) -> RunResult:
        """One request; leaves the closing line on stderr."""
        request = {"prompt": text, "add_special": add_special, "parse_special": True, "n_predict": self.n_predict}
        pieces: list[TokenEvent] = []
        done: Done | None = None
        with _answer_stops_on_sigint(self.engine):
            for event in self.engine.answer(request | {"stops": list(self.stops)}):
                if isinstance(event, Done):
                    done = event
                    continue
                pieces.append(event)
                if self.show:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
        assert done is not None  # answer() ends with it or raises
        answer = "".join(piece.text for piece in pieces)
        if self.show and not answer.endswith("\n"):
            print(flush=True)
        drawn = [piece for piece in pieces if piece.id >= 0]  # -1: the rest of the text, held back as a possible stop
        times = [piece.t_us for piece in drawn]
        itl_ms = [(b - a) / 1000 for a, b in itertools.pairwise(times)]
        stats = stats_of(done, self.loaded, self.options, itl_ms)
        self.last = RunResult(answer, tuple(piece.id for piece in drawn), done.stop, stats)
        self.rss_peak_bytes = done.rss_peak_bytes
        print(closing_line(stats, done.stop), file=sys.stderr)
        return self.last


def _read_prompt(prompt: str | None, prompt_file: Path | None, escape: bool) -> str | None:
    if prompt is not None and prompt_file is not None:
        raise UsageError("-p and -f both give a prompt; use one of them")
    if prompt_file is not None:
        return read_text(prompt_file, "the prompt").removesuffix("\n")
    if prompt is not None:
        if not prompt.strip():
            raise UsageError("the prompt is empty; expected some text after -p")
        return unescape(prompt) if escape else prompt
    return None


def _read_line() -> str | None:
    """One line from the user: with a prompt, editing and history on a terminal, plain from a pipe."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is what gives input() editing and history
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def run(
    package: Path,
    *,
    engine: EngineOptions | None = None,
    sampling: SamplingOptions | None = None,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    chat: bool = False,
    system: str | None = None,
    n_predict: int = -1,
    stops: Sequence[str] = (),
    escape: bool = True,
    as_json: bool = False,
    place: Place | None = None,
) -> RunResult:
    """Writes text with a model.

    Args:
        package: a package folder (a GGUF file with `engine.load` "mmap" or "none").
        engine, sampling: options of the session and of drawing tokens.
        prompt, prompt_file: the text to continue; with `chat`, the user's first turn. One of them.
        chat: a dialogue in the model's own template, lines from stdin.
        system: the system message of a chat.
        n_predict: most tokens per answer; -1: until the model stops or the context is full.
        stops: strings that end an answer; they are not part of it.
        escape: read \\n and the like in `prompt`, `system` and `stops`, as llama.cpp does.
        place: where the engine runs; None: this machine.
        as_json: one JSON object on stdout instead of the text; a chat then needs a prompt and has one turn.

    Returns:
        The (last) answer; `stop` is "interrupted" after Ctrl-C, "exit" after a dialogue.

    Raises:
        UsageError: no prompt, an empty one, or options that exclude each other.
        BudgetError: the memory budget is too small.
        MkdeployError: the engine failed.
    """
    options, sampling = engine or EngineOptions(), sampling or SamplingOptions()
    text = _read_prompt(prompt, prompt_file, escape)
    if text is None and (as_json or not chat):
        also = "; with --json a chat has one turn" if chat else ", or --chat"
        raise UsageError("nothing to do: give a prompt with -p TEXT or -f FILE" + also)
    if system is not None and not chat:
        raise UsageError("--system has an effect only with --chat: a plain prompt has no roles")
    if not -1 <= n_predict < 2**31 or n_predict == 0:
        raise UsageError(f"-n {n_predict} makes no sense; expected 1 to {2**31 - 1}, or -1 for no limit")
    for what, given in (("the prompt", text), ("--system", system), *(("--stop", stop) for stop in stops)):
        if given is not None and any("\ud800" <= char <= "\udfff" for char in given):
            raise UsageError(f"{what} is not valid UTF-8; expected text in UTF-8")
    if "" in stops:
        raise UsageError("--stop is empty; expected some text")
    for what, file in (("the grammar", sampling.grammar), ("the LoRA", options.lora)):
        if file is not None and not file.is_file():
            raise UsageError(f"{file}: {what} does not exist; check the path")
    header_file = metadata_file(package, options.load)
    if options.load == "paged":
        open_package(package)  # strict: what it refuses, llama.cpp might abort on
    template = None
    if chat:
        from mkdeploy.gguf_io import read_header

        template = ChatTemplate.of_header(read_header(header_file))
    if escape:
        system = None if system is None else unescape(system)
        stops = [unescape(stop) for stop in stops]
    place = place or ThisMachine()
    model = place.model(package)
    if options.lora is not None:
        options = dataclasses.replace(options, lora=Path(place.file(options.lora)))
    if sampling.grammar is not None:
        sampling = dataclasses.replace(sampling, grammar=Path(place.file(sampling.grammar)))
    arguments = ["generate", *options.argv(model), *sampling.argv(), "--requests"]
    console = rich.console.Console(stderr=True)
    with place.start(arguments, on_note=lambda note: print(f"note: {note}", file=sys.stderr)) as child:
        with console.status(f"loading {package.name}") if console.is_terminal else contextlib.nullcontext():
            loaded = child.wait_loaded()
        speaker = _Speaker(child, loaded, options, n_predict, tuple(stops), show=not as_json)
        if template is None:
            assert text is not None  # checked above
            result: RunResult | None = speaker.say(text, add_special=True)
        else:
            result = _chat(speaker, template, system, text, once=as_json)
    if result is None:
        return RunResult("", (), "exit", {})
    print(memory_table(loaded.memory, speaker.rss_peak_bytes), file=sys.stderr)
    if as_json:
        json.dump(result.to_dict(), sys.stdout, indent=2)
        print(flush=True)
    return result


def _chat(
    speaker: _Speaker, template: ChatTemplate, system: str | None, first: str | None, *, once: bool
) -> RunResult | None:
    """Runs the dialogue; None if there was no turn."""

    def answer(messages: Sequence[Message]) -> Reply:
        text = template.render(messages)
        result = speaker.say(text, add_special=template.add_special(text))
        return Reply(result.text, context_full=result.stop == "context")

    if sys.stdin.isatty() and not once:
        print("/help lists the commands, /exit leaves", file=sys.stderr)
    read_line = (lambda: None) if once else _read_line
    chat_loop(read_line, answer, lambda line: print(line, file=sys.stderr), system=system, first=first)
    if once or speaker.last is None:
        return speaker.last
    return dataclasses.replace(speaker.last, stop="exit")  # Ctrl-C in an answer is no failure of the program
