"""Quantising through llama.cpp, in a child process.

Job: `quantize` runs llama_model_quantize with every default that would fight us set explicitly (types of output and
embedding, a pattern for every tensor so that no heuristic chooses, bounded buffers). Choice: a child process
(`python -m mkdeploy.convert.quantize`), because llama.cpp reports some errors by aborting, and because its memory is
then gone when it ends. The request goes in as JSON on stdin; progress and errors come back as JSON lines, mixed with
llama.cpp's own log, whose last lines go into the error message. Guarantees: the child never outlives its parent.
What it does not do: decide types, or check them afterwards (type_plan.py does).
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import DEFAULT_ALIGNMENT
from mkdeploy.progress import Progress
from mkdeploy.sizes import format_size

MAX_BUF_BYTES = 64 * 2**20
_BASE_FTYPE = 7  # Q8_0: must be a block type, or llama.cpp ignores the patterns
_MARK = "\x1emkd "
_TENSOR_LINE = re.compile(r"\[\s*\d+/\s*\d+\]\s+(\S+)\s+- \[")


@dataclass(frozen=True)
class QuantizeRequest:
    """One call of llama_model_quantize; types are ggml's numbers, patterns are ECMAScript regular expressions."""

    src: str  # the first split, if split
    out: str
    overrides: Sequence[tuple[str, int]]
    output_type: int
    embedding_type: int
    allow_requantize: bool
    imatrix: str | None
    reset_alignment: bool  # the source's general.alignment is not 32, which llama.cpp would copy without following it
    n_threads: int


def quantize(request: QuantizeRequest, tensor_bytes: Mapping[str, int], progress: Progress) -> None:
    """Runs a request in a child process.

    Args:
        request: what to do; `request.out` must not exist.
        tensor_bytes: source bytes by tensor name, for the progress.
        progress: told when a tensor is done.

    Raises:
        MkdeployError: llama.cpp failed or aborted; with its last words. A partial output may remain.
    """
    env = dict(os.environ, GGML_NO_BACKTRACE="1", PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), env.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [sys.executable, "-m", "mkdeploy.convert.quantize", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        errors="replace",
    )
    assert child.stdin is not None and child.stdout is not None
    progress.start("quantise", sum(tensor_bytes.values()))
    log: deque[str] = deque(maxlen=12)
    error: str | None = None
    running = 0
    try:
        try:
            child.stdin.write(json.dumps(asdict(request)))
            child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its output says why
        for line in child.stdout:
            text, _, message = line.rstrip("\n").partition(_MARK)
            if text.strip():
                log.append(text.strip())
            if not message:
                continue
            event: dict[str, Any] = json.loads(message)
            error = event.get("error", error)
            if "tensor" in event:
                progress.advance(running)
                running = tensor_bytes.get(event["tensor"], 0)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
    if code == 0 and error is None:
        progress.advance(running)
        progress.finish()
        return
    if error is None or code < 0:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        error = _explain(request, code, how, log)
    raise MkdeployError(error)


def _explain(request: QuantizeRequest, code: int, how: str, log: Sequence[str]) -> str:
    """One line out of a failed child's last words."""
    out = Path(request.out)
    free = shutil.disk_usage(out.parent).free
    words = " | ".join(log) or "it said nothing"
    if "iostream error" in words or "No space left" in words or "File too large" in words:
        return f"{out}: writing failed; {format_size(free)} are free there: make room or convert to another disk"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"{request.src}: llama.cpp {how}{hint} while quantising; its last words: {words}"


def _emit(**event: object) -> None:
    sys.stdout.write(_MARK + json.dumps(event) + "\n")
    sys.stdout.flush()


def _die_with_parent(parent_pid: int) -> None:
    """Linux: SIGKILL for us when the parent ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the call below never returns to Python's handler
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            sys.exit(1)


def _run(request: QuantizeRequest) -> int:
    """The child's work: one call of llama_model_quantize. Returns its status."""
    import llama_cpp as lc

    pending = ""

    def on_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        nonlocal pending
        del level, user_data
        pending += text.decode("utf-8", "replace")
        match = _TENSOR_LINE.match(pending)
        if match:
            _emit(tensor=match[1])
            pending = ""  # the rest of the line is sizes
        *lines, pending = pending.split("\n")
        for line in lines:
            if line.strip():
                print(line.strip(), flush=True)

    callback = lc.llama_log_callback(on_log)
    lc.llama_log_set(callback, ctypes.c_void_p(0))
    params = lc.llama_model_quantize_default_params()
    params.nthread = request.n_threads
    params.ftype = _BASE_FTYPE
    params.output_tensor_type = request.output_type
    params.token_embedding_type = request.embedding_type
    params.allow_requantize = request.allow_requantize
    params.quantize_output_tensor = True
    params.only_copy = params.pure = params.keep_split = params.dry_run = False
    params.max_buf_size = MAX_BUF_BYTES
    # ctypes keeps references only to what we keep: `keep` must live until the call returns.
    keep: list[Any] = [_overrides(lc, request.overrides)]
    params.tt_overrides = ctypes.cast(keep[0], ctypes.POINTER(lc.llama_model_tensor_override))
    if request.imatrix is not None:
        keep.append(_imatrix(lc, request))
        params.imatrix = ctypes.cast(keep[-1][0], ctypes.POINTER(lc.llama_model_imatrix_data))
    if request.reset_alignment:
        kv = (lc.llama_model_kv_override * 2)()
        item: Any = kv[0]
        item.tag, item.key, item.value.val_i64 = 0, b"general.alignment", DEFAULT_ALIGNMENT
        keep.append(kv)
        params.kv_overrides = ctypes.cast(kv, ctypes.POINTER(lc.llama_model_kv_override))
    return int(lc.llama_model_quantize(os.fsencode(request.src), os.fsencode(request.out), ctypes.byref(params)))


def _overrides(lc: Any, overrides: Sequence[tuple[str, int]]) -> Any:
    array = (lc.llama_model_tensor_override * (len(overrides) + 1))()
    for item, (pattern, kind) in zip(array, overrides, strict=False):
        item.pattern, item.type = pattern.encode(), kind
    return array


def _imatrix(lc: Any, request: QuantizeRequest) -> tuple[Any, Any]:
    from mkdeploy.convert.imatrix import read_imatrix
    from mkdeploy.convert.source import open_source

    assert request.imatrix is not None
    entries = read_imatrix(Path(request.imatrix), open_source(Path(request.src))[0].by_name)
    array = (lc.llama_model_imatrix_data * (len(entries) + 1))()
    floats = ctypes.POINTER(ctypes.c_float)
    for item, (name, values) in zip(array, entries.items(), strict=False):
        item.name, item.data, item.size = name.encode(), values.ctypes.data_as(floats), values.size
    return array, entries


def main() -> int:
    """The child: reads a request from stdin, returns the exit status."""
    _die_with_parent(int(sys.argv[1]))
    raw = json.load(sys.stdin)
    raw["overrides"] = [(str(p), int(t)) for p, t in raw["overrides"]]
    try:
        return 1 if _run(QuantizeRequest(**raw)) else 0
    except MkdeployError as e:
        _emit(error=str(e))
        return 1


if __name__ == "__main__":
    sys.exit(main())
