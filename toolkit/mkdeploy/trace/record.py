"""`mkdeploy trace`: records which experts every token of some texts chooses.

Job: decode texts (teacher forced: the text's own tokens, nothing is sampled) and keep what the engine's on_route hook
reports. Choice: windows of n_ctx tokens without overlap, each from an empty context and, where the model has one, a BOS
of its own before the text's tokens, so that every token of the text is recorded once; the last window of a text is as
long as it comes out. Every token asks for an output, because llama.cpp's last layer skips the rows of those that do
not. Guarantees: one row per decoded token and MoE layer. What it does not do: router weights and hidden states.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mkdeploy import __version__
from mkdeploy.bindings.session import Session
from mkdeploy.convert.output import new_file, stop_signals_raise
from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.model_file import metadata_file, read_text
from mkdeploy.package.manifest import read_manifest
from mkdeploy.progress import NullProgress, Progress
from mkdeploy.trace.file import Trace, dump_trace

MAX_BATCH = 128  # tokens; each has a row of logits
MIN_CTX = 8

Ids = npt.NDArray[np.int32]


def windows(ids: Ids, n_ctx: int, bos: int | None) -> Iterator[Ids]:
    """A text's tokens cut into windows of up to n_ctx tokens, in order.

    Args:
        ids: [n] the text, without BOS.
        n_ctx: longest window, >= 2.
        bos: put before each window's tokens, within n_ctx; None: the model has none.
    """
    room = n_ctx if bos is None else n_ctx - 1
    for first in range(0, len(ids), room):
        part = ids[first : first + room]
        yield part if bos is None else np.concatenate((np.array([bos], dtype=np.int32), part))


class _Rows:
    """Collects what on_route reports for one batch, [n_tokens, n_moe_layer, n_expert_used] when it is complete."""

    def __init__(self, layers: Sequence[int], n_expert_used: int) -> None:
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._n_expert_used = n_expert_used
        self._parts: list[list[Ids]] = [[] for _ in layers]

    def on_route(self, layer: int, ids: Ids) -> None:
        self._parts[self._index[layer]].append(ids)

    def take(self, n_tokens: int) -> Ids:
        rows = np.empty((n_tokens, len(self._parts), self._n_expert_used), dtype=np.int32)
        for layer, i in self._index.items():
            seen = sum(len(part) for part in self._parts[i])
            if seen != n_tokens:
                raise MkdeployError(f"layer {layer} routed {seen} of a batch's {n_tokens} tokens; cannot be recorded")
            rows[:, i] = np.concatenate(self._parts[i])
            self._parts[i].clear()
        return rows


def record(
    package: Path,
    texts: Sequence[Path],
    *,
    n_ctx: int = 512,
    n_tokens: int | None = None,
    engine: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Records a trace.

    Args:
        package: a package folder.
        texts: UTF-8 texts.
        n_ctx: longest window in tokens, >= 8.
        n_tokens: stop after so many decoded tokens; None: the whole texts.
        engine: memory, cache slots, threads, …; its context and batch sizes are not used.
        progress: where to report, in bytes of the texts.

    Raises:
        UsageError: no text, an empty one, or an argument is out of range.
        MkdeployError: a text cannot be read, or the engine failed.
    """
    if n_ctx < MIN_CTX:
        raise UsageError(f"-c {n_ctx} is too short a window; expected {MIN_CTX} or more tokens")
    if n_tokens is not None and n_tokens < 1:
        raise UsageError(f"--tokens {n_tokens} makes no sense; expected 1 or more")
    if not texts:
        raise UsageError("no text was given; name one or more files with --text")
    metadata_file(package, "paged")
    manifest = read_manifest(package)
    contents = [read_text(text, "the text") for text in texts]
    layers = [layer.layer for layer in manifest.layers]
    rows = _Rows(layers, manifest.model.n_expert_used)
    n_batch = min(n_ctx, MAX_BATCH)
    experts: list[Ids] = []
    tokens: list[Ids] = []
    starts: list[int] = []
    start_texts: list[int] = []
    n_done = 0
    show = progress or NullProgress()
    options = {**(engine or EngineOptions()).session(), "prefetch": "off", "n_seq_max": 1}
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch, "n_outputs_max": n_batch}
    with Session(package, **options, **sizes) as session:
        session.set_hooks(on_route=rows.on_route)
        bos_id = session.meta("tokenizer.ggml.bos_token_id") if session.model_info.add_bos else None
        bos = None if bos_id is None else int(bos_id)
        show.start("recording", sum(len(content.encode()) for content in contents))
        for i_text, content in enumerate(contents):
            ids = np.array(session.tokenize(content, add_special=False, parse_special=False), dtype=np.int32)
            bytes_per_token = len(content.encode()) / max(len(ids), 1)
            for whole in windows(ids, n_ctx, bos):
                window = whole if n_tokens is None else whole[: n_tokens - n_done]
                if not len(window):
                    break
                starts.append(n_done)
                start_texts.append(i_text)
                session.memory_remove()
                for first in range(0, len(window), n_batch):
                    batch = window[first : first + n_batch]
                    session.decode(batch, output="all")
                    experts.append(rows.take(len(batch)))
                tokens.append(window)
                n_done += len(window)
                show.advance(round(bytes_per_token * len(window)))
        show.finish()
    if not n_done:
        raise UsageError(f"{texts[0]} has no tokens")
    return Trace(
        experts=np.concatenate(experts),
        tokens=np.concatenate(tokens),
        starts=np.array(starts, dtype=np.int64),
        texts=tuple(str(text) for text in texts),
        start_texts=np.array(start_texts, dtype=np.int32),
        layers=np.array(layers, dtype=np.int32),
        n_expert=np.array([layer.n_expert for layer in manifest.layers], dtype=np.int32),
        model=manifest.model.name,
        package_id=manifest.package_id,
        n_ctx=n_ctx,
        created_by=f"mkdeploy {__version__}",
    )


def record_to(
    out: Path,
    package: Path,
    texts: Sequence[Path],
    *,
    force: bool = False,
    n_ctx: int = 512,
    n_tokens: int | None = None,
    engine: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Records a trace into a file, which appears whole or not at all; arguments and errors as `record`.

    Raises:
        MkdeployError: `out` exists (unless `force` and it is a file), or cannot be written.
    """
    with stop_signals_raise(), new_file(out, force, progress or NullProgress()) as sink:
        trace = record(package, texts, n_ctx=n_ctx, n_tokens=n_tokens, engine=engine, progress=progress)
        sink.write(dump_trace(trace))
    return trace
