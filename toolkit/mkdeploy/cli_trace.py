"""The commands for routing traces: trace, trace replay.

Job: the same as cli.py's, whose app they join. Choice: `trace` takes a package and has one subcommand, so the program
knows two commands, "trace" and "trace replay", and the first hands over to the second when its first word is `replay`
(a package of that name is ./replay).
"""

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from mkdeploy.cli_engine import CacheSlots, Memory, Threads
from mkdeploy.cli_options import DebugOption, JsonOption, print_json, print_rich, spread_values

REPLAY = "replay"


class TraceCommand(TyperCommand):
    """`trace PKG --text FILES… …`, or `trace replay …`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] == [REPLAY]:
            name = f"{info_name} {REPLAY}"
            replay = cast(TyperGroup, parent.command).commands[name]
            return replay.make_context(name, args[1:], parent=parent, **extra)
        return super().make_context(info_name, spread_values(args, "--text"), parent=parent, **extra)


def trace(
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A package.")],
    text: Annotated[list[Path], typer.Option("--text", metavar="FILES…", help="The texts to decode.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="T.npz", help="The trace.")],
    n_tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", min=1, help="Stop after so many.")] = None,
    n_ctx: Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", min=8, help="Tokens per window.")] = 512,
    memory: Memory = None,
    cache_slots: CacheSlots = 0,
    n_threads: Threads = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the trace if it exists.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Record which experts every token of some texts chooses.

    The texts are decoded in windows of -c tokens; docs/trace.md describes the file. `mkdeploy trace replay T.npz`
    scores cache policies on it.
    """
    from mkdeploy.engine.process import EngineOptions
    from mkdeploy.progress import RichProgress
    from mkdeploy.trace.record import record_to

    engine = EngineOptions(memory=memory or 0, cache_slots=cache_slots, n_threads=n_threads)
    with RichProgress() as progress:
        recorded = record_to(
            out, package, text, force=force, n_ctx=n_ctx, n_tokens=n_tokens, engine=engine, progress=progress
        )
    figures = recorded.summary()
    if as_json:
        print_json({"path": str(out), **figures})
    else:
        print(
            f"{out}: {figures['n_tokens']} tokens in {figures['n_windows']} windows, {figures['n_moe_layer']} MoE"
            f" layers, {figures['n_expert_used']} of {figures['n_expert']} experts each"
        )


def trace_replay(
    file: Annotated[Path, typer.Argument(metavar="T.npz", help="A trace.")],
    cache_slots: Annotated[
        str | None, typer.Option("--cache-slots", metavar="N,…", help="Slots per MoE layer; default ¼, ⅜, ½, ¾ of all.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME,…", help="Only these; docs/trace.md says what they do.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Tokens per batch; 1: decode.")] = 1,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score cache policies on a trace.

    The routing is replayed in the engine's own cache: hit rate, loads per token, and what Bélády's optimum would have
    hit more. Policies: lru, lfu, lru-quota, lfu-quota, lru-global, lru-protected, belady, belady-global.
    """
    from mkdeploy.bench.options import parse_int_list, parse_name_list
    from mkdeploy.trace import replay as replay_module
    from mkdeploy.trace.file import load_trace

    slots = () if cache_slots is None else parse_int_list(cache_slots)
    policies = replay_module.POLICIES if policy is None else parse_name_list(policy)
    recorded = load_trace(file)
    rows = replay_module.replay(recorded, cache_slots=slots, policies=policies, batch=batch)
    if as_json:
        print_json({**recorded.summary(), "batch": batch, "rows": [row.to_json() for row in rows]})
    else:
        print_rich(replay_module.render(recorded, rows, batch))


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    app.command("trace", cls=TraceCommand)(trace)
    app.command(f"trace {REPLAY}")(trace_replay)
