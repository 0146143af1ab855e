"""convert and merge on every tiny architecture; the reference is llama.cpp's own quantiser, called without our code."""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.errors import MkdeployError
from mkdeploy.package.inspection import inspect
from models.tiny import TINY_ARCHS, build_tiny, build_tiny_dense
from tests.unit.convert_samples import read_tensors

Q4_0 = 2


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_keep_types_restores_the_very_file(arch: str, tmp_path: Path) -> None:
    model = build_tiny(arch, tmp_path / "m.gguf")
    convert(model, tmp_path / "p.mkd", keep_types=True, shard_bytes=100_000)
    assert inspect(tmp_path / "p.mkd", verify=True).verified
    merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_defaults_equal_a_pure_q4_0_of_llama_cpp(arch: str, tmp_path: Path, load_stock: Any) -> None:
    model = build_tiny(arch, tmp_path / "m.gguf")
    convert(model, tmp_path / "p.mkd")
    merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = params.output_tensor_type = params.token_embedding_type = Q4_0
    params.pure = params.allow_requantize = True
    path = tmp_path / "reference.gguf"
    assert llama_cpp.llama_model_quantize(bytes(model), bytes(path), ctypes.byref(params)) == 0
    ours, reference = read_tensors(tmp_path / "out.gguf"), read_tensors(path)
    assert ours == reference
    assert list(ours) == list(read_tensors(model)), "the source's order is lost"
    with load_stock(tmp_path / "out.gguf") as a, load_stock(path) as b:
        assert (a.decode([1, 2, 3, 4]) == b.decode([1, 2, 3, 4])).all()


def test_gpt_oss_is_requantised_with_a_warning_and_kept_on_request(tmp_path: Path) -> None:
    model = build_tiny("gpt-oss", tmp_path / "m.gguf")
    assert any("quantised already" in w for w in convert(model, tmp_path / "q.mkd").warnings)
    assert not convert(model, tmp_path / "k.mkd", keep_types=True).warnings
    kinds = {
        name: {t.type for t in inspect(tmp_path / name).types if t.where == "experts"} for name in ("q.mkd", "k.mkd")
    }
    assert kinds == {"q.mkd": {"Q4_0"}, "k.mkd": {"MXFP4"}}


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MkdeployError, match="dense"):
        convert(build_tiny_dense(tmp_path / "m.gguf"), tmp_path / "p.mkd")
