"""The benchmark's random MoE in a small geometry: loads, routes by token, takes any text, is reproducible."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.random_moe import Geometry, build_random_moe

SMALL = Geometry(layers=2, experts=16, used=4, embd=256, ff=64, ff_shared=128, heads=4, vocab=2000)
TEXT = "Ein Text, \u65e5\u672c\u8a9e and some more words that the model has never seen.\n"


def test_small_model_decodes_and_routes_by_token(tmp_path: Path, load_stock: Any) -> None:
    path = build_random_moe(tmp_path / "m.gguf", SMALL)
    with load_stock(path, n_expert=SMALL.experts) as model:
        ids = model.tokenize(TEXT)
        assert model.detokenize(ids) == TEXT
        logits = model.decode(np.random.default_rng(0).integers(3, SMALL.vocab, 64), all_logits=True)
        routes = {il: np.concatenate(ranks)[:, : SMALL.used] for il, ranks in model.routes.items()}
    assert np.isfinite(logits).all()
    assert sorted(routes) == [0, 1]
    for chosen in routes.values():
        assert len(np.unique(chosen)) > SMALL.experts / 2
        assert len(np.unique(np.sort(chosen, axis=1), axis=0)) > 32


def test_weights_are_zero_mean_with_the_planned_spread(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(build_random_moe(tmp_path / "m.gguf", SMALL))
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_up_exps.weight")
    weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert weights.shape == (SMALL.experts, SMALL.ff, SMALL.embd)
    assert abs(weights.mean()) < 0.01 / SMALL.embd**0.5
    assert weights.std() == pytest.approx(1 / SMALL.embd**0.5, rel=0.01)


def test_same_seed_same_file(tmp_path: Path) -> None:
    def digest(file: str, seed: int) -> str:
        return hashlib.sha256(build_random_moe(tmp_path / file, SMALL, seed=seed).read_bytes()).hexdigest()

    assert digest("a.gguf", 3) == digest("b.gguf", 3)
    assert digest("a.gguf", 3) != digest("c.gguf", 4)


def test_default_geometry_is_the_benchmarks() -> None:
    assert Geometry().expert_bytes() == 4_866_048
    assert Geometry().expert_bytes() * Geometry().layers * Geometry().experts == 3_737_124_864


def test_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(OSError, match="MB needed, 0 MB free"):
        build_random_moe(tmp_path / "m.gguf", SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Geometry(ff=100), "ff is 100"),
        (Geometry(used=65), "used 65"),
        (Geometry(heads=3), "heads is 3"),
        (Geometry(vocab=100), "n_vocab is 100"),
    ],
)
def test_impossible_geometry_is_refused(geometry: Geometry, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_random_moe(tmp_path / "m.gguf", geometry)
    assert not list(tmp_path.iterdir())
