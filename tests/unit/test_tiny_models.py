"""Every tiny model builds, loads and decodes in stock llama.cpp, routes by token, and is reproducible."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from models.tiny import N_VOCAB, N_WINDOW, TINY_ARCHS, Ftype, build_tiny, build_tiny_dense

NAMES = list(TINY_ARCHS)
MAX_BYTES = 1_000_000
TEXT = "The router of layer 3 said: \u201cna\u00efve caf\u00e9\u201d \u4e16\u754c \U0001f600\n\tx = 42;"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def built(tiny_dir: Path) -> dict[str, Path]:
    """Every tiny model as f16, seed 0."""
    return {name: build_tiny(name, tiny_dir / f"{name}.gguf") for name in NAMES}


def _random_ids(n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, N_VOCAB, n_tokens)


def _experts(path: Path) -> tuple[int, int, list[int], int]:
    """(n_expert, n_expert_used, layers with routed experts, NextN layers) of a GGUF."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()

    def key(name: str, default: int = 0) -> int:
        field = reader.fields.get(f"{arch}.{name}")
        return int(field.contents()) if field else default

    n_nextn = key("nextn_predict_layers")
    n_trunk = key("block_count") - n_nextn
    layers = {int(t.name.split(".")[1]) for t in reader.tensors if t.name.endswith("ffn_down_exps.weight")}
    return key("expert_count"), key("expert_used_count"), sorted(il for il in layers if il < n_trunk), n_nextn


@pytest.mark.parametrize("name", NAMES)
def test_decodes_prompts_of_all_lengths(name: str, built: dict[str, Path], load_stock: Any) -> None:
    assert built[name].stat().st_size < MAX_BYTES
    with load_stock(built[name], n_ctx=512) as model:
        for n_tokens in (1, 7, 64, 300):
            model.clear()
            logits = model.decode(_random_ids(n_tokens))
            after = model.decode([int(logits[-1].argmax())], n_tokens)
            for row in (logits[-1], after[-1]):
                assert np.isfinite(row).all()
                assert row.std() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_routing_varies_by_token(name: str, built: dict[str, Path], load_stock: Any) -> None:
    n_expert, n_used, layers, _ = _experts(built[name])
    with load_stock(built[name], n_expert=n_expert) as model:
        model.decode(_random_ids(64), all_logits=True)
        routes = {il: np.concatenate(ranks)[:, :n_used] for il, ranks in model.routes.items()}
    assert sorted(routes) == layers
    for il, ids in routes.items():
        assert ids.shape == (64, n_used)
        assert len(np.unique(ids)) > n_expert / 2, f"layer {il}"
        assert len(np.unique(np.sort(ids, axis=1), axis=0)) > 8, f"layer {il}: all tokens alike"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ftype", ["f32", "q4_0", "q8_0"])
def test_other_types_decode(name: str, ftype: Ftype, tmp_path: Path, load_stock: Any) -> None:
    with load_stock(build_tiny(name, tmp_path / "m.gguf", ftype=ftype)) as model:
        assert np.isfinite(model.decode(_random_ids(7))).all()


@pytest.mark.parametrize("name", NAMES)
def test_text_survives_the_tokenizer(name: str, built: dict[str, Path], load_stock: Any) -> None:
    with load_stock(built[name]) as model:
        ids = model.tokenize(TEXT)
        assert model.detokenize(ids) == TEXT
    assert len(ids) < len(TEXT.encode()), "no piece longer than a byte was used"


@pytest.mark.parametrize("name", [*NAMES, "dense"])
def test_same_seed_same_file(name: str, tmp_path: Path) -> None:
    def digest(file: str, seed: int) -> str:
        path = tmp_path / file
        build_tiny_dense(path, seed=seed) if name == "dense" else build_tiny(name, path, seed=seed)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    assert digest("a.gguf", 1) == digest("b.gguf", 1)
    assert digest("a.gguf", 1) != digest("c.gguf", 2)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4"])
def test_sliding_window_keeps_its_meaning_in_a_short_cache(name: str, built: dict[str, Path], load_stock: Any) -> None:
    ids = _random_ids(300)
    logits = {}
    for swa_full in (False, True):
        with load_stock(built[name], swa_full=swa_full) as model:
            assert llama.llama_model_n_swa(model.model) == N_WINDOW
            logits[swa_full] = model.decode(ids)
    assert np.allclose(logits[False], logits[True], atol=1e-3)


@pytest.mark.parametrize("name", ["deepseek2-mtp", "glm4moe"])
@pytest.mark.parametrize("load_mtp", [False, True])
def test_nextn_layer(name: str, load_mtp: bool, built: dict[str, Path], load_stock: Any) -> None:
    assert _experts(built[name])[3] == 1
    with load_stock(built[name], load_mtp=load_mtp) as model:
        assert np.isfinite(model.decode(_random_ids(7))).all()


def test_dense_model_has_no_experts(tmp_path: Path, load_stock: Any) -> None:
    path = build_tiny_dense(tmp_path / "dense.gguf")
    assert _experts(path)[:3] == (0, 0, [])
    with load_stock(path) as model:
        assert np.isfinite(model.decode(_random_ids(7))).all()


def test_unknown_name_and_ftype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model 'gpt2'"):
        build_tiny("gpt2", tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="ftype is 'q2_k'"):
        build_tiny("olmoe", tmp_path / "m.gguf", ftype="q2_k")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
