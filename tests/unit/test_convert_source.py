"""Which models convert accepts: MoE layouts, split files, and what it says about the others."""

import shutil
from pathlib import Path

import gguf
import pytest

from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.convert.source import moe_layout, open_source
from mkdeploy.errors import MkdeployError
from mkdeploy.package.manifest import read_manifest
from tests.unit.convert_samples import Sample, Watcher, read_tensors, write_sample, write_splits
from tests.unit.test_convert_header import refuse


def test_dense_model(tmp_path: Path) -> None:
    refuse(write_sample(tmp_path / "d.gguf", Sample(dense=True)), "dense", "expert_count 0", "Mixture-of-Experts")


def test_expert_count_without_experts(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "d.gguf")
    path.write_bytes(path.read_bytes().replace(b"_exps.weight", b"_expx.weight"))
    refuse(path, "dense", "expert_count 4")


def test_missing_role(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "d.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down_exps", b"blk.1.ffn_dowm_exps"))
    refuse(path, "layer 1", "up+gate+down")


def test_expert_used_count_out_of_range(tmp_path: Path) -> None:
    refuse(write_sample(tmp_path / "d.gguf", Sample(n_used=5)), "expert_used_count is 5", "1..4")


def test_experts_of_unequal_number(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "d.gguf")
    data = path.read_bytes()
    key = b"qwen2moe.expert_count"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + b"\x08" + data[at + 1 :])
    refuse(path, "expected 3 dimensions, the last 8")


def test_fused_gate_up(tmp_path: Path) -> None:
    layout = moe_layout(open_source(write_sample(tmp_path / "m.gguf", Sample(fused=True)))[0])
    assert [role for role, _ in layout.layers[0].tensors] == ["gate_up", "down"]


def test_no_gate(tmp_path: Path) -> None:
    layout = moe_layout(open_source(write_sample(tmp_path / "m.gguf", Sample(gate=False)))[0])
    assert [role for role, _ in layout.layers[0].tensors] == ["up", "down"]


def test_nextn_layers_stay_resident(tmp_path: Path) -> None:
    source = write_sample(tmp_path / "m.gguf", Sample(n_layer=3, n_nextn=1))
    convert(source, tmp_path / "p.mkd", keep_types=True)
    manifest = read_manifest(tmp_path / "p.mkd")
    assert [x.layer for x in manifest.layers] == [0, 1]
    assert (manifest.model.n_layer, manifest.model.n_layer_nextn, manifest.model.n_moe_layer) == (3, 1, 2)
    resident = read_tensors(tmp_path / "p.mkd" / "resident.gguf")
    assert "blk.2.ffn_up_exps.weight" in resident
    assert "blk.1.ffn_up_exps.weight" not in resident


def test_shard_of_a_package_as_source(tmp_path: Path) -> None:
    convert(write_sample(tmp_path / "m.gguf"), tmp_path / "p.mkd", keep_types=True)
    for name in ("resident.gguf", "experts-00001-of-00001.gguf"):
        shutil.copy(tmp_path / "p.mkd" / name, tmp_path / name)  # beside the package: nothing is written into one
    refuse(tmp_path / "resident.gguf", "resident file of an mkdeploy package", "--merge")
    refuse(tmp_path / "experts-00001-of-00001.gguf", "experts file of an mkdeploy package")


@pytest.mark.parametrize("given", [0, 1, 2])
def test_split_files(tmp_path: Path, given: int) -> None:
    paths = write_splits(tmp_path, "m", 3)
    show = Watcher()
    convert(paths[given], tmp_path / "p.mkd", progress=show, expert_type="q8_0")
    assert len(read_manifest(tmp_path / "p.mkd").source_files) == 3
    assert bool(show.warnings) == (given > 0)
    convert(tmp_path / "m-whole.gguf", tmp_path / "w.mkd", expert_type="q8_0")
    merge(tmp_path / "p.mkd", tmp_path / "p.gguf")
    merge(tmp_path / "w.mkd", tmp_path / "w.gguf")
    assert read_tensors(tmp_path / "p.gguf") == read_tensors(tmp_path / "w.gguf")
    assert not [k for k in gguf.GGUFReader(tmp_path / "p.gguf").fields if k.startswith(("split.", "mkd."))]


def test_split_files_without_quantising(tmp_path: Path) -> None:
    paths = write_splits(tmp_path, "m", 2)
    convert(paths[0], tmp_path / "p.mkd", keep_types=True)
    merge(tmp_path / "p.mkd", tmp_path / "p.gguf")
    assert read_tensors(tmp_path / "p.gguf") == read_tensors(tmp_path / "m-whole.gguf")


def test_missing_split(tmp_path: Path) -> None:
    paths = write_splits(tmp_path, "m", 3)
    paths[1].unlink()
    with pytest.raises(MkdeployError, match=r"m-00002-of-00003\.gguf is missing \(1 of 3"):
        convert(paths[2], tmp_path / "p.mkd")


def test_split_with_another_name(tmp_path: Path) -> None:
    paths = write_splits(tmp_path, "m", 2)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    refuse(renamed, "part 1 of 2", "-00001-of-00002.gguf")


def test_split_of_another_model(tmp_path: Path) -> None:
    paths = write_splits(tmp_path, "m", 3)
    shutil.copy(paths[0], paths[1])
    with pytest.raises(MkdeployError, match="says it is split no 0 of 3; expected no 1"):
        convert(paths[0], tmp_path / "p.mkd")


def test_one_tensor_per_expert(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "d.gguf")
    path.write_bytes(
        path.read_bytes()
        .replace(b"ffn_down_exps.weight", b"ffn_down.0000.weight")
        .replace(b"_exps.weight", b"_expx.weight")
    )
    refuse(path, "one tensor per expert")
