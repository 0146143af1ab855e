"""A damaged, mixed-up or tampered package is refused: by every command at once, or by --verify and --merge."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import read_header
from mkdeploy.package.inspection import inspect, render
from mkdeploy.package.verify import open_package
from tests.unit.convert_samples import Sample, write_sample

SHARD_BYTES = 40_000


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.mkd and b.mkd, of different models with equal sizes; several shards each."""
    folder = tmp_path_factory.mktemp("packages")
    for name, seed in (("a", 0), ("b", 1)):
        model = write_sample(folder / f"{name}.gguf", Sample(seed=seed))
        convert(model, folder / f"{name}.mkd", keep_types=True, shard_bytes=SHARD_BYTES)
    return folder


@pytest.fixture
def package(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "a.mkd", tmp_path / "p.mkd"))


def shard(package: Path, i: int = 1) -> Path:
    return sorted(package.glob("experts-*"))[i]


def edit_manifest(package: Path, edit: Callable[[Any], None]) -> None:
    path = package / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def refuse(package: Path, *words: str, verify: bool = False) -> None:
    with pytest.raises(MkdeployError) as caught:
        inspect(package, verify=verify)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_good_package(package: Path) -> None:
    inspection = inspect(package, verify=True)
    data = json.loads(json.dumps(inspection.to_dict()))
    assert data["n_layer"] == data["n_moe_layer"] == 2
    assert (data["n_expert"], data["n_expert_used"]) == (4, 2)
    assert data["expert_bytes"] == 3 * 64 * 32 * 2
    assert data["working_set_bytes"] == 2 * 2 * data["expert_bytes"]
    assert data["experts_bytes_total"] == 8 * data["expert_bytes"]
    assert data["budget"][-1]["expert_share"] == 1
    assert data["budget"][-1]["memory_bytes"] == data["resident_bytes"] + 8 * data["expert_stride_bytes"]
    assert {t["type"] for t in data["types"]} == {"F16", "F32"}
    assert data["verified"]
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    console.print(render(inspection))
    text = console.export_text()
    assert "working set" in text and "all verified" in text and "100%" in text


def test_shards_respect_their_size(package: Path) -> None:
    opened = open_package(package)
    assert len(opened.shards) > 2
    assert all(h.file_bytes <= SHARD_BYTES for h in opened.shards)


def test_missing_shard(package: Path) -> None:
    shard(package).unlink()
    refuse(package, shard(package).name[:7], "is missing")


def test_extra_shard(package: Path) -> None:
    shutil.copy(shard(package), package / "experts-00009-of-00009.gguf")
    refuse(package, "experts-00009-of-00009.gguf", "not listed")


def test_shard_of_another_package(package: Path, originals: Path) -> None:
    shutil.copy(shard(originals / "b.mkd"), shard(package))
    refuse(package, shard(package).name, "belongs to package")


def test_exchanged_shards(package: Path) -> None:
    first, second = shard(package, 0), shard(package, 1)
    first.rename(package / "x")
    second.rename(first)
    (package / "x").rename(second)
    refuse(package, first.name, "says shard 1")


def test_wrong_size(package: Path) -> None:
    with open(shard(package), "ab") as f:
        f.write(b"\0")
    refuse(package, shard(package).name, "bytes; expected")


def test_truncated(package: Path) -> None:
    path = shard(package)
    os.truncate(path, path.stat().st_size - 1)
    refuse(package, path.name, "bytes; expected")


@pytest.mark.parametrize("where", ["payload", "padding", "resident"])
def test_flipped_byte(package: Path, tmp_path: Path, where: str) -> None:
    path = package / "resident.gguf" if where == "resident" else shard(package)
    tensor = read_header(path).tensors[1]
    at = tensor.offset + (tensor.n_bytes if where == "padding" else 5)
    if where == "padding":
        at = read_header(path).data_offset - 1
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    inspect(package)  # sizes and headers are right
    refuse(package, path.name, "sha256" if where != "payload" else "XXH3-64", "convert or copy", verify=True)
    if where == "padding":
        return  # no tensor's data
    with pytest.raises(MkdeployError, match=path.name):
        merge(package, tmp_path / "m.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.mkd"]


def test_flipped_bytes_in_two_files_are_counted(package: Path) -> None:
    for i in (0, 1):
        data = bytearray(shard(package, i).read_bytes())
        data[read_header(shard(package, i)).data_offset] ^= 1
        shard(package, i).write_bytes(data)
    refuse(package, shard(package, 0).name, "3 more", verify=True)


def test_another_format_version(package: Path) -> None:
    edit_manifest(package, lambda d: d.update(format_version=2))
    refuse(package, "manifest.json", "format_version is 2", "reads version 1", "update mkdeploy")


def test_symlink_out_of_the_package(package: Path, tmp_path: Path) -> None:
    path = shard(package)
    path.rename(tmp_path / "elsewhere.gguf")
    path.symlink_to(tmp_path / "elsewhere.gguf")
    refuse(package, path.name, "outside the package")


def test_manifest_that_lists_other_tensors(package: Path) -> None:
    def edit(d: Any) -> None:
        t = d["layers"][0]["tensors"][0]
        t["ne"] = t["ne"][::-1]

    edit_manifest(package, edit)
    refuse(package, "blk.0.ffn_up_exps.0.weight", "expected F16 [32, 64]")


def test_merge_refuses_an_existing_file(package: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(MkdeployError, match="exists already"):
        merge(package, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"
    merge(package, tmp_path / "m.gguf", force=True)
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"
