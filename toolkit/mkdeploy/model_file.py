"""A model's metadata and tokenizer without its weights.

Job: what the Python side needs to know before or beside the engine: the chat template, and token ids of a text. Choice:
a package's resident.gguf is an ordinary GGUF with all metadata, so llama.cpp itself loads the vocabulary from it
(`vocab_only`), in this process, in a fraction of a second and without reading a weight. What it does not do: decode.
"""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.gguf_io import GgufHeader, read_header

RESIDENT = "resident.gguf"


def metadata_file(model: Path, load: str) -> Path:
    """The GGUF that holds the model's metadata.

    Args:
        model: a package folder for load "paged", a GGUF file otherwise.

    Raises:
        MkdeployError: nothing there.
        UsageError: a file where a package is expected, or the other way round.
    """
    if not model.exists():
        raise MkdeployError(f"{model} does not exist; check the path")
    if load == "paged":
        if not model.is_dir():
            raise UsageError(f"{model} is a file; expected a package: make one with `mkdeploy convert {model} OUT.mkd`")
        if not (model / RESIDENT).is_file():
            raise MkdeployError(f"{model} holds no {RESIDENT}; expected a package, as `mkdeploy convert` writes it")
        return model / RESIDENT
    if model.is_dir():
        raise UsageError(f"{model} is a folder; --load {load} needs a GGUF file (`mkdeploy convert --merge` makes one)")
    return model


def model_header(model: Path, load: str = "paged") -> GgufHeader:
    """The header of the model's metadata file; errors as `metadata_file` and `read_header`."""
    return read_header(metadata_file(model, load))


def tokenize(gguf: Path, text: str) -> npt.NDArray[np.int32]:
    """Token ids of a text, as a prompt: with the special tokens that the model expects around it.

    Args:
        gguf: any GGUF with the model's metadata; tensors are not read.
        text: control tokens in it are plain text.

    Returns:
        [n_tokens] int32.

    Raises:
        MkdeployError: the file has no tokenizer that llama.cpp knows.
    """
    read_header(gguf)  # llama.cpp aborts on some broken files; this reader refuses them first
    import llama_cpp.llama_cpp as llama

    messages: list[str] = []
    quiet = llama.llama_log_callback(lambda level, line, user: messages.append(line.decode("utf-8", "replace").strip()))
    before, before_data = llama.llama_log_callback(), ctypes.c_void_p()
    llama.llama_log_get(ctypes.byref(before), ctypes.byref(before_data))  # the engine in this process may listen
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    try:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(gguf).encode(), params)
        if not model:
            said = messages[-1] if messages else "no message"
            raise MkdeployError(f"{gguf}: llama.cpp cannot read its tokenizer: {said}")
        try:
            vocab = llama.llama_model_get_vocab(model)
            data = text.encode("utf-8", "surrogatepass")
            ids = np.empty(len(data) + 8, dtype=np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = int(llama.llama_tokenize(vocab, data, len(data), pointer, len(ids), True, False))
        finally:
            llama.llama_model_free(model)
    finally:
        llama.llama_log_set(before, before_data)
    if n < 0:
        raise MkdeployError(f"{gguf}: llama.cpp's tokenizer returned {n} for {len(data)} bytes of text")
    return ids[:n].copy()


def n_vocab(header: GgufHeader) -> int:
    """Entries of the vocabulary."""
    tokens = header.by_key.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise MkdeployError(f"{header.path}: metadata key tokenizer.ggml.tokens is missing; convert the model again")
    return len(tokens.value())


def read_text(file: Path, what: str) -> str:
    """A UTF-8 text file.

    Raises:
        MkdeployError: missing, unreadable, empty or not UTF-8.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise MkdeployError(f"{file}: {what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MkdeployError(f"{file}: {what} is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise UsageError(f"{file}: {what} is empty")
    return text
