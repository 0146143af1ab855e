"""The commands that start the engine: run, bench, iobench, eval.

Job: the same as cli.py's, whose app they join: arguments into one call, nothing else. Options that an engine takes are
spelled once, as types; `run` takes single values, `bench` takes llama-bench's lists of them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mkdeploy.cli_options import DebugOption, JsonOption, print_json, print_rich, size_option
from mkdeploy.errors import UsageError

# ---------------------------------------------------------------- engine options

Package = Annotated[Path, typer.Argument(metavar="PKG", help="A package; with --load mmap or none, a GGUF.")]
Memory = Annotated[
    int | None, typer.Option("--memory", metavar="SIZE", parser=size_option, help="Bound of all the engine holds.")
]
CacheSlots = Annotated[int, typer.Option("--cache-slots", metavar="N", min=0, help="Experts held per MoE layer.")]
Load = Annotated[Literal["paged", "mmap", "none"], typer.Option("--load", help="mmap, none: stock llama.cpp.")]
Context = Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", min=0, help="Context; 0: the model's own.")]
Threads = Annotated[int, typer.Option("-t", "--threads", metavar="N", min=0, help="Compute threads; 0: one per core.")]
Batch = Annotated[int, typer.Option("-b", "--batch-size", metavar="N", min=1, help="Logical batch.")]
Ubatch = Annotated[int, typer.Option("-ub", "--ubatch", "--ubatch-size", metavar="N", min=1, help="Physical batch.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE", help="Type of the KV cache's keys.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="Type of the KV cache's values.")]
Lanes = Annotated[int, typer.Option("--lanes", metavar="N", min=0, help="Reads in flight; 0: the engine's choice.")]
IoEngine = Annotated[Literal["auto", "pread", "uring"], typer.Option("--io", help="How files are read.")]
IoChunk = Annotated[
    int, typer.Option("--io-chunk", metavar="SIZE", parser=size_option, help="Bytes of one read; 0: the engine's.")
]
Prefetch = Annotated[
    Literal["off", "router", "temporal", "auto"], typer.Option("--prefetch", help="Who predicts what to read ahead.")
]
CachePolicy = Annotated[Literal["lru", "lfu"], typer.Option("--cache-policy", help="Who leaves a full cache.")]
WholeExperts = Annotated[bool, typer.Option("--whole-experts", help="Compute an expert only when all of it is here.")]
Cold = Annotated[bool, typer.Option("--cold", help="Drop every expert after each pass.")]
Buffered = Annotated[bool, typer.Option("--buffered", help="Read through the page cache instead of O_DIRECT.")]
Verify = Annotated[Literal["first", "always", "off"], typer.Option("--verify", help="When checksums are compared.")]
ExtraBufts = Annotated[
    bool | None, typer.Option("--extra-bufts/--no-extra-bufts", help="Repacked weights.", show_default=False)
]
Lora = Annotated[Path | None, typer.Option("--lora", metavar="FILE", help="LoRA adapter (not on routed experts).")]
LoraScale = Annotated[float, typer.Option("--lora-scale", metavar="X", help="Its weight.")]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="ggml device that computes experts.")]
Serial = Annotated[
    str | None, typer.Option("--serial", metavar="SERIAL|HOST:PORT", help="On this phone (adb's serial).")
]


@contextlib.contextmanager
def _place(serial: str | None) -> Iterator[Any]:
    """Where the engine runs: the phone of this serial, or (None) this machine, which is never guessed to be a phone."""
    if serial is None:
        yield None
        return
    from mkdeploy.device.place import open_phone

    with open_phone(serial) as phone:
        yield phone


def run(
    package: Package,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read it from here.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A dialogue, in the model's own template.")] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")] = None,
    n_predict: Annotated[int, typer.Option("-n", "--predict", metavar="N", help="Most tokens; -1: no limit.")] = -1,
    stops: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End there; repeatable.")] = None,
    grammar: Annotated[Path | None, typer.Option("--grammar", metavar="FILE", help="GBNF grammar.")] = None,
    temp: Annotated[float | None, typer.Option("--temp", metavar="T", help="0: greedy. Default 0.8.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", help="0: off. Default 40.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", help="1: off. Default 0.95.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", metavar="P", help="0: off. Default 0.05.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="-1: random. Default random.")] = None,
    escape: Annotated[bool, typer.Option("--escape/--no-escape", "-e", help="Read \\n and the like in -p.")] = True,
    memory: Memory = None,
    cache_slots: CacheSlots = 0,
    n_ctx: Context = 4096,
    n_threads: Threads = 0,
    n_batch: Batch = 2048,
    n_ubatch: Ubatch = 512,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    n_lanes: Lanes = 0,
    io: IoEngine = "auto",
    io_chunk: IoChunk = "0",  # type: ignore[assignment]  # parsed like an argument
    prefetch: Prefetch = "auto",
    cache_policy: CachePolicy = "lfu",
    whole_experts: WholeExperts = False,
    cold: Cold = False,
    buffered: Buffered = False,
    verify: Verify = "first",
    extra_bufts: ExtraBufts = None,
    lora: Lora = None,
    lora_scale: LoraScale = 1.0,
    device: Device = None,
    load: Load = "paged",
    serial: Serial = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> int:
    """Write text: continue a prompt, or chat.

    The text goes to stdout; speed, hit rate, flash traffic and where the memory went go to stderr.
    """
    from mkdeploy import run as run_module
    from mkdeploy.engine.process import EngineOptions, SamplingOptions

    engine = EngineOptions(
        load=load,
        memory=memory or 0,
        cache_slots=cache_slots,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_threads=n_threads,
        type_k=type_k,
        type_v=type_v,
        n_lanes=n_lanes,
        io=io,
        io_chunk=io_chunk,
        prefetch=prefetch,
        cache_policy=cache_policy,
        whole_experts=whole_experts,
        cold=cold,
        buffered=buffered,
        verify=verify,
        extra_bufts=extra_bufts,
        lora=lora,
        lora_scale=lora_scale,
        device=device,
    )
    sampling = SamplingOptions(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, grammar=grammar)
    with _place(serial) as place:
        result = run_module.run(
            package,
            engine=engine,
            sampling=sampling,
            prompt=prompt,
            prompt_file=prompt_file,
            chat=chat,
            system=system,
            n_predict=n_predict,
            stops=stops or (),
            escape=escape,
            as_json=as_json,
            place=place,
        )
    return 130 if result.stop == "interrupted" else 0


def bench(
    package: Package,
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", metavar="N,…", help="Prompt lengths; 0: none.")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", metavar="N,…", help="Generation lengths; 0: none.")] = "128",
    reps: Annotated[int, typer.Option("-r", "--repetitions", metavar="R", help="Counted repetitions.")] = 5,
    output: Annotated[str, typer.Option("-o", "--output", metavar="md|json|jsonl|csv", help="Format.")] = "md",
    output_err: Annotated[
        str | None, typer.Option("-oe", "--output-err", metavar="FORMAT", help="Also to stderr, in this format.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Feed this text's tokens.")] = None,
    random_tokens: Annotated[bool, typer.Option("--random-tokens", help="Feed random tokens: no locality.")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the random tokens.")] = 0,
    compare: Annotated[str | None, typer.Option("--compare", metavar="mmap", help="Stock llama.cpp, in turns.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", metavar="PHONE", help="Slow reads to its flash.")] = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE,…", help="Bounds of all the engine holds.")] = "0",
    cache_slots: Annotated[str, typer.Option("--cache-slots", metavar="N,…", help="Experts held per layer.")] = "0",
    memory_cap: Annotated[
        int | None, typer.Option("--memory-cap", metavar="SIZE", parser=size_option, help="cgroup limit.")
    ] = None,
    drop_caches: Annotated[bool, typer.Option("--drop-caches", help="Empty the page cache first (root).")] = False,
    cold: Cold = False,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="One repetition that is not counted.")] = True,
    n_ctx: Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", min=0, help="0: what the tests need.")] = 0,
    n_threads: Annotated[str, typer.Option("-t", "--threads", metavar="N,…", help="0: one per core.")] = "0",
    n_batch: Annotated[str, typer.Option("-b", "--batch-size", metavar="N,…", help="Logical batch.")] = "2048",
    n_ubatch: Annotated[
        str, typer.Option("-ub", "--ubatch", "--ubatch-size", metavar="N,…", help="Physical batch.")
    ] = "512",
    type_k: Annotated[str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE,…", help="KV cache: keys.")] = "f16",
    type_v: Annotated[str, typer.Option("-ctv", "--cache-type-v", metavar="TYPE,…", help="KV cache: values.")] = "f16",
    n_lanes: Annotated[str, typer.Option("--lanes", metavar="N,…", help="Reads in flight; 0: the engine's.")] = "0",
    io_chunk: Annotated[str, typer.Option("--io-chunk", metavar="SIZE,…", help="Of one read; 0: the engine's.")] = "0",
    prefetch: Annotated[
        str, typer.Option("--prefetch", metavar="MODE,…", help="off, router, temporal, auto: who predicts.")
    ] = "auto",
    cache_policy: Annotated[str, typer.Option("--cache-policy", metavar="NAME,…", help="lru, lfu.")] = "lfu",
    io: IoEngine = "auto",
    whole_experts: WholeExperts = False,
    buffered: Buffered = False,
    verify: Verify = "first",
    extra_bufts: ExtraBufts = None,
    lora: Lora = None,
    lora_scale: LoraScale = 1.0,
    device: Device = None,
    load: Load = "paged",
    serial: Serial = None,
    cool_to: Annotated[
        float | None, typer.Option("--cool-to", metavar="C", help="Before each repetition, wait for this (°C).")
    ] = None,
    cool_timeout: Annotated[
        float, typer.Option("--cool-timeout", metavar="S", min=0, help="But no longer than this.")
    ] = 300.0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="The phone's record; default runs/DATE-DEVICE.json.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Measure speed as llama-bench does, and what paging costs.

    Lists are written as llama-bench writes them (1,8,32 or 16-128*2) and give one row per combination.
    With --serial the package is pushed if it has changed, everything runs on the phone, and a record with its
    temperatures, frequencies and memory around each repetition is kept.
    """
    from mkdeploy.bench import measure as bench_module
    from mkdeploy.engine.process import EngineOptions

    ints, names = bench_module.parse_int_list, bench_module.parse_name_list
    options = bench_module.BenchOptions(
        n_prompt=ints(n_prompt),
        n_gen=ints(n_gen),
        reps=reps,
        memory=bench_module.parse_size_list(memory),
        cache_slots=ints(cache_slots),
        n_batch=ints(n_batch),
        n_ubatch=ints(n_ubatch),
        n_threads=ints(n_threads),
        type_k=names(type_k),
        type_v=names(type_v),
        n_lanes=ints(n_lanes),
        io_chunk=bench_module.parse_size_list(io_chunk),
        prefetch=names(prefetch),
        cache_policy=names(cache_policy),
        engine=EngineOptions(
            load=load,
            io=io,
            whole_experts=whole_experts,
            cold=cold,
            buffered=buffered,
            verify=verify,
            extra_bufts=extra_bufts,
            lora=lora,
            lora_scale=lora_scale,
            device=device,
        ),
        n_ctx=n_ctx,
        text=text,
        random_tokens=random_tokens,
        seed=seed,
        compare=compare,
        profile=profile,
        warmup=warmup,
        drop_caches=drop_caches,
        memory_cap=memory_cap,
    )
    if serial is None:
        if cool_to is not None or save is not None:
            raise UsageError(f"{'--cool-to' if save is None else '--save'} has an effect only with --serial")
        bench_module.bench(package, options, output=output, output_err=output_err)
        return
    from mkdeploy.device.bench import bench_on_phone

    bench_on_phone(
        package,
        options,
        serial,
        output=output,
        output_err=output_err,
        cool_to_c=cool_to,
        cool_timeout_s=cool_timeout,
        save=save,
    )


def iobench(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a folder for a scratch file.")] = Path("."),
    blocks: Annotated[
        str, typer.Option("--block", metavar="SIZE,…", help="Block sizes.")
    ] = "4KiB,64KiB,256KiB,512KiB,1MiB,4MiB",
    n_lanes: Annotated[str, typer.Option("--lanes", metavar="N,…", help="Reads in flight.")] = "1,2,4",
    direct_only: Annotated[bool, typer.Option("--direct-only", help="Leave the buffered reads out.")] = False,
    n_bytes: Annotated[
        int, typer.Option("--bytes", metavar="SIZE", parser=size_option, help="Read so much per row, at most.")
    ] = "256MiB",  # type: ignore[assignment]  # parsed like an argument; the help shows it as it is written here
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="And so long, at most.")] = 1.0,
    profile: Annotated[str | None, typer.Option("--profile", metavar="PHONE", help="Slow reads to its flash.")] = None,
    serial: Serial = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure storage as the engine reads it: block size by reads in flight, direct and buffered.

    With --serial PATH is a file on the phone; without one a scratch file is made there, and removed afterwards.
    """
    from mkdeploy import iobench as iobench_module
    from mkdeploy.bench.options import parse_int_list, parse_size_list
    from mkdeploy.profiles import load_profile

    if serial is not None and profile is not None:
        raise UsageError("--profile works on this machine only; leave it out with --serial")
    with _place(serial) as place, contextlib.ExitStack() as stack:
        target: str | Path = path
        if place is not None and path == Path("."):
            target = stack.enter_context(place.scratch(n_bytes))
        rows = iobench_module.iobench(
            target,
            blocks=parse_size_list(blocks),
            lanes=parse_int_list(n_lanes),
            direct_and_buffered=not direct_only,
            bytes=n_bytes,
            seconds=seconds,
            profile=None if profile is None else load_profile(profile),
            runner=iobench_module.run_local if place is None else lambda words: iobench_module.run_at(place, words),
        )
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_rich(iobench_module.render(rows))


def evaluate(
    package: Package,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to score.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="SRC.gguf", help="Also KL and top-1 agreement with this model.")
    ] = None,
    n_ctx: Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", min=8, help="Tokens per window.")] = 512,
    n_chunks: Annotated[int | None, typer.Option("--chunks", metavar="N", min=1, help="Only so many windows.")] = None,
    memory: Memory = None,
    cache_slots: CacheSlots = 0,
    n_threads: Threads = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score a package: perplexity, and how far it is from its source.

    As llama-perplexity: windows of -c tokens, the second half of each is scored.
    """
    from mkdeploy import evaluate as evaluate_module
    from mkdeploy.engine.process import EngineOptions
    from mkdeploy.progress import RichProgress

    engine = EngineOptions(memory=memory or 0, cache_slots=cache_slots, n_threads=n_threads)
    with RichProgress() as progress:
        evaluation = evaluate_module.evaluate(
            package, text, against=against, n_ctx=n_ctx, n_chunks=n_chunks, engine=engine, progress=progress
        )
    if as_json:
        print_json(evaluation.to_dict())
    else:
        print_rich(evaluation.render())


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    app.command()(run)
    app.command()(bench)
    app.command()(iobench)
    app.command("eval")(evaluate)
