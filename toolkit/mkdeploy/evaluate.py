"""`mkdeploy eval`: what conversion cost in quality, so that nobody ships a silent loss.

Job: perplexity of a package over a text and, against its source, the mean KL divergence and how often both would pick
the same token. Choice: llama-perplexity's method, so that numbers compare: windows of n_ctx tokens without overlap, the
first token replaced by BOS where the model has one, the first half of each window is context only, and positions
n_ctx/2 .. n_ctx-2 each predict the next token. KL is KL(source || package) over the whole vocabulary at the same
positions, in nats. Guarantees: both models see the same batches; memory is bounded by one batch of logits, whatever
the text's length. What it does not do: print.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mkdeploy.bindings.session import Session
from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.model_file import metadata_file, read_text
from mkdeploy.progress import NullProgress, Progress

MAX_BATCH = 512
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """Quality of a package. Without a source, `kl`, `top1_agreement` and `ppl_source` are None."""

    ppl: float
    ppl_stderr: float
    kl: float | None  # mean KL(source || package), nats
    kl_p99: float | None
    top1_agreement: float | None  # 0..1
    ppl_source: float | None
    n_tokens: int  # predictions that were scored
    n_windows: int
    n_ctx: int

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def render(self) -> str:
        """For people."""
        lines = [
            f"perplexity       {self.ppl:.4f} ± {self.ppl_stderr:.4f}",
            f"scored           {self.n_tokens} tokens, the second half of {self.n_windows} windows of {self.n_ctx}",
        ]
        if self.kl is not None and self.top1_agreement is not None and self.ppl_source is not None:
            change = self.ppl / self.ppl_source - 1
            lines[1:1] = [
                f"of the source    {self.ppl_source:.4f} ({100 * change:+.2f} %)",
                f"KL divergence    {self.kl:.6f} nats on average, {self.kl_p99:.6f} at the 99th percentile",
                f"same top token   {100 * self.top1_agreement:.2f} %",
            ]
        return "\n".join(lines)


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    """Log-probabilities of one row: [n_vocab] float32 -> [n_vocab] float64, numerically stable."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Floats = shifted - math.log(float(np.exp(shifted).sum()))
    return result


def kl_divergence(log_p: Floats, log_q: Floats) -> float:
    """KL(p || q) in nats of two rows of log-probabilities, [n_vocab] each."""
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def windows(ids: npt.NDArray[np.int32], n_ctx: int, bos: int | None) -> Iterator[npt.NDArray[np.int32]]:
    """The text cut into windows: [n_ctx] int32 each, the rest dropped, the first token replaced by `bos` if given."""
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        window = ids[start : start + n_ctx].copy()
        if bos is not None:
            window[0] = bos
        yield window


class _Sums:
    """Running sums over scored tokens."""

    def __init__(self) -> None:
        self.nll: list[float] = []
        self.nll_source: list[float] = []
        self.kl: list[float] = []
        self.n_same = 0

    def add(self, target: int, package: Floats, source: Floats | None) -> None:
        self.nll.append(-float(package[target]))
        if source is not None:
            self.nll_source.append(-float(source[target]))
            self.kl.append(kl_divergence(source, package))
            self.n_same += int(package.argmax() == source.argmax())


def _score(sessions: list[Session], window: npt.NDArray[np.int32], n_batch: int, sums: _Sums) -> None:
    """Decodes one window with every session and scores its second half."""
    first, last = len(window) // 2, len(window) - 2
    for session in sessions:
        session.memory_remove()
    for start in range(0, len(window), n_batch):
        ids = window[start : start + n_batch]
        wanted = [first <= start + i <= last for i in range(len(ids))]
        pos = np.arange(start, start + len(ids), dtype=np.int32)
        for session in sessions:
            session.decode(ids, pos=pos, output=wanted)
        for i in (i for i, want in enumerate(wanted) if want):
            rows = [log_softmax(session.logits(i)) for session in sessions]
            sums.add(int(window[start + i + 1]), rows[0], rows[1] if len(rows) > 1 else None)


def evaluate(
    package: Path,
    text: Path,
    *,
    against: Path | None = None,
    n_ctx: int = 512,
    n_chunks: int | None = None,
    engine: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measures quality.

    Args:
        package: a package folder.
        text: UTF-8 text of at least 2 * n_ctx tokens, as llama-perplexity asks.
        against: the source GGUF; it is mapped, not read whole.
        n_ctx: window length in tokens, >= 8.
        n_chunks: only so many windows; None: all.
        engine: memory, cache slots, threads, …; its context and batch sizes are not used.
        progress: where to report, in bytes of the text.

    Raises:
        UsageError: the text is too short, or an argument is out of range.
        MkdeployError: the source is of another vocabulary, or the engine failed.
    """
    if n_ctx < 8:
        raise UsageError(f"-c {n_ctx} is too short a window; expected 8 or more tokens")
    if n_chunks is not None and n_chunks < 1:
        raise UsageError(f"--chunks {n_chunks} makes no sense; expected 1 or more")
    options = engine or EngineOptions()
    metadata_file(package, options.load)
    if against is not None:
        metadata_file(against, "mmap")
    content = read_text(text, "the text")
    n_batch = min(n_ctx, MAX_BATCH)
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch}
    with Session(package, **options.session(), **sizes) as ours:
        ids = np.array(ours.tokenize(content, parse_special=False), dtype=np.int32)
        if len(ids) < 2 * n_ctx:
            raise UsageError(
                f"{text} has {len(ids)} tokens; expected at least {2 * n_ctx}, two windows of {n_ctx}:"
                " give a longer text or a smaller -c"
            )
        bos = ours.meta("tokenizer.ggml.bos_token_id") if ours.model_info.add_bos else None
        cut = list(windows(ids, n_ctx, None if bos is None else int(bos)))[:n_chunks]
        n_bytes = len(content.encode()) * len(cut) * n_ctx // len(ids)
        show = progress or NullProgress()
        if against is None:
            return _evaluate([ours], cut, n_batch, n_ctx, show, n_bytes)
        stock: dict[str, Any] = {"n_threads": options.n_threads, "type_k": options.type_k, "type_v": options.type_v}
        with Session(against, load="mmap", use_extra_bufts=options.extra_bufts, **stock, **sizes) as source:
            same = source.model_info.n_vocab == ours.model_info.n_vocab
            if not same or source.tokenize(content, parse_special=False) != ids.tolist():
                raise MkdeployError(f"{against} splits the text into other tokens than {package}: it is not its source")
            return _evaluate([ours, source], cut, n_batch, n_ctx, show, n_bytes)


def _evaluate(
    sessions: list[Session],
    cut: list[npt.NDArray[np.int32]],
    n_batch: int,
    n_ctx: int,
    show: Progress,
    text_bytes: int,
) -> Evaluation:
    sums = _Sums()
    show.start("scoring", text_bytes)
    for i, window in enumerate(cut):
        _score(sessions, window, n_batch, sums)
        show.advance(text_bytes * (i + 1) // len(cut) - text_bytes * i // len(cut))
    show.finish()
    nll = np.array(sums.nll)
    ppl = math.exp(float(nll.mean()))
    both = bool(sums.kl)
    return Evaluation(
        ppl=ppl,
        ppl_stderr=ppl * float(nll.std()) / math.sqrt(max(len(nll) - 1, 1)),
        kl=float(np.mean(sums.kl)) if both else None,
        kl_p99=float(np.percentile(sums.kl, 99)) if both else None,
        top1_agreement=sums.n_same / len(nll) if both else None,
        ppl_source=math.exp(float(np.mean(sums.nll_source))) if both else None,
        n_tokens=len(nll),
        n_windows=len(cut),
        n_ctx=n_ctx,
    )
