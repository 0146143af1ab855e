"""convert and merge on small models: types, bytes, determinism, options. The gguf library's quantiser is the oracle."""

import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.package.inspection import inspect
from mkdeploy.package.manifest import read_manifest
from mkdeploy.package.verify import open_package
from tests.unit.convert_samples import Q, Sample, Watcher, read_tensors, write_sample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "m.gguf")


def contents(package: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(package.iterdir())}


def types_of(path: Path) -> dict[str, str]:
    return {name: kind for name, (kind, _, _) in read_tensors(path).items()}


def test_defaults_make_everything_q4_0_but_routers_norms_and_biases(model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "p.mkd")
    assert result.quantised and not result.warnings
    merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    before, after = read_tensors(model), read_tensors(tmp_path / "out.gguf")
    assert list(before) == list(after)
    for name, (kind, shape, data) in after.items():
        if before[name][0] == "F32":
            assert (kind, shape, data) == before[name], name
        else:
            floats = np.frombuffer(before[name][2], np.float16).astype(np.float32).reshape(shape[::-1])
            assert kind == "Q4_0", name
            assert data == gguf.quants.quantize(floats, Q.Q4_0).tobytes(), name
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["general.file_type"].contents() == 2
    assert not [k for k in fields if k.startswith("mkd.")]


def test_experts_lie_back_to_back_in_order_of_use(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "p.mkd", keep_types=True)
    before = read_tensors(model)
    opened = open_package(tmp_path / "p.mkd")
    shard = read_tensors(opened.shards[0].path)
    names = [f"blk.{x}.ffn_{r}_exps.{e}.weight" for x in (0, 1) for e in range(4) for r in ("up", "gate", "down")]
    assert list(shard) == names
    for name, (kind, shape, data) in shard.items():
        _, x, tensor, e, _ = name.split(".")
        source_kind, source_shape, source = before[f"blk.{x}.{tensor}.weight"]
        assert (kind, shape) == (source_kind, source_shape[:2])
        assert data == source[int(e) * len(data) : (int(e) + 1) * len(data)]
    offsets = [t.offset for t in opened.shards[0].tensors]
    assert all(o % 4096 == 0 for o in offsets)
    assert {b - a for a, b in itertools.pairwise(offsets)} == {4096}


@pytest.mark.parametrize("alignment", [0, 64, 4096])
@pytest.mark.parametrize("sample", [Sample(), Sample(fused=True), Sample(gate=False), Sample(n_layer=3, n_nextn=1)])
def test_keep_types_and_merge_restore_the_very_file(tmp_path: Path, sample: Sample, alignment: int) -> None:
    sample.alignment = alignment
    model = write_sample(tmp_path / "m.gguf", sample)
    convert(model, tmp_path / "p.mkd", keep_types=True, shard_bytes=50_000)
    result = merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == model.read_bytes()
    assert result.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()


@pytest.mark.parametrize("alignment", [64, 4096])
def test_quantising_a_source_with_its_own_alignment(tmp_path: Path, alignment: int) -> None:
    """llama.cpp copies general.alignment but pads to 32: without our override the result cannot be read."""
    plain = write_sample(tmp_path / "a.gguf")
    model = write_sample(tmp_path / "m.gguf", Sample(alignment=alignment))
    for path in (plain, model):
        convert(path, path.with_suffix(".mkd"))
        merge(path.with_suffix(".mkd"), path.with_suffix(".out.gguf"))
    assert read_tensors(tmp_path / "a.out.gguf") == read_tensors(tmp_path / "m.out.gguf")
    assert gguf.GGUFReader(tmp_path / "m.out.gguf").alignment == alignment


@pytest.mark.parametrize(
    ("resident", "expert"),
    [
        ("q8_0", "q4_0"),
        ("f16", "Q4_0"),
        ("q4_0", "f16"),
        ("bf16", "f32"),
        ("f16", "bf16"),
        ("q5_1", "iq4_nl"),
        ("mxfp4", "q4_1"),
    ],
)
def test_types_are_independent(model: Path, tmp_path: Path, resident: str, expert: str) -> None:
    convert(model, tmp_path / "p.mkd", resident_type=resident, expert_type=expert)
    merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    before = types_of(model)
    for name, kind in types_of(tmp_path / "out.gguf").items():
        wanted = "F32" if before[name] == "F32" else (expert if "_exps" in name else resident).upper()
        assert kind == wanted, name


def test_k_quants_where_they_fit_and_named_fallbacks_elsewhere(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(n_embd=256, n_ff=64))
    result = convert(model, tmp_path / "p.mkd", resident_type="q6_K", expert_type="q4_k")
    tensors = {t.role: t.type for t in read_manifest(tmp_path / "p.mkd").layers[0].tensors}
    assert tensors == {"up": "Q4_K", "gate": "Q4_K", "down": "Q5_0"}
    (line,) = [w for w in result.warnings if "ffn_down_exps" in w]
    assert "blk.0.ffn_down_exps.weight and 1 more become Q5_0, not Q4_K" in line and "64 elements" in line


def test_rows_that_no_block_divides_become_f16(tmp_path: Path) -> None:
    """For token_embd llama.cpp has no fallback and would abort."""
    model = write_sample(tmp_path / "m.gguf", Sample(n_embd=80))
    result = convert(model, tmp_path / "p.mkd")
    kinds = types_of(tmp_path / "p.mkd" / "resident.gguf")
    assert kinds["token_embd.weight"] == "F16"
    assert any("80 elements" in w for w in result.warnings)


def test_nextn_experts_are_quantised_as_resident(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(n_layer=3, n_nextn=1))
    convert(model, tmp_path / "p.mkd", resident_type="q8_0")
    kinds = types_of(tmp_path / "p.mkd" / "resident.gguf")
    assert kinds["blk.2.ffn_up_exps.weight"] == "Q8_0"
    assert {t.type for x in read_manifest(tmp_path / "p.mkd").layers for t in x.tensors} == {"Q4_0"}


def test_requantising_warns_once(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(quant=Q.MXFP4))
    show = Watcher()
    result = convert(model, tmp_path / "p.mkd", progress=show)
    assert [w for w in show.warnings if "quantised already" in w] == list(result.warnings)
    assert len(result.warnings) == 1 and result.warnings[0].startswith("6 tensors")
    assert {t.type for t in read_manifest(tmp_path / "p.mkd").layers[0].tensors} == {"Q4_0"}


def test_keep_types_keeps_mxfp4(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(quant=Q.MXFP4))
    result = convert(model, tmp_path / "p.mkd", keep_types=True)
    assert not result.warnings and not result.quantised
    assert {t.type for t in read_manifest(tmp_path / "p.mkd").layers[0].tensors} == {"MXFP4"}


def test_a_source_with_the_wanted_types_is_split_without_quantising(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(quant=Q.Q4_0))
    show = Watcher()
    convert(model, tmp_path / "p.mkd", resident_type="f16", progress=show)
    assert "quantise" not in show.labels
    merge(tmp_path / "p.mkd", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == model.read_bytes()


def test_same_source_and_options_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    first = convert(model, tmp_path / "a.mkd", shard_bytes=60_000)
    convert(model, tmp_path / "b.mkd", shard_bytes=60_000)
    assert contents(tmp_path / "a.mkd") == contents(tmp_path / "b.mkd")
    other = convert(model, tmp_path / "c.mkd", shard_bytes=60_001)
    assert other.package_id != first.package_id
    manifest = json.loads((tmp_path / "a.mkd" / "manifest.json").read_text())
    assert manifest["source"]["files"][0]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()


def write_dat(path: Path, entries: dict[str, Any]) -> None:
    """A legacy importance matrix: two calls, sums of both."""
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 2, len(values))
        data += np.asarray(values * 2, "<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 2, 0))


def write_gguf_imatrix(path: Path, entries: dict[str, Any], n_expert: int) -> None:
    """llama-imatrix's GGUF: sums of three tokens and the counts per expert."""
    w = gguf.GGUFWriter(path, "none")
    w.add_string("general.type", "imatrix")
    for name, values in entries.items():
        n = n_expert if "_exps" in name else 1
        w.add_tensor(name + ".in_sum2", np.asarray(values * 3, np.float32).reshape(n, -1))
        w.add_tensor(name + ".counts", np.full((n, 1), 3, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture
def entries(model: Path) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {n: s for n, (_, s, _) in read_tensors(model).items() if "_exps.weight" in n or "attn_q.weight" in n}
    return {n: rng.integers(1, 9, s[0] * (s[2] if len(s) > 2 else 1)).astype(np.float32) for n, s in shapes.items()}


def test_both_imatrix_formats_give_the_same_weights(model: Path, tmp_path: Path, entries: dict[str, Any]) -> None:
    write_dat(tmp_path / "i.dat", entries)
    write_gguf_imatrix(tmp_path / "i.gguf", entries, 4)
    results = []
    for imatrix in (tmp_path / "i.dat", tmp_path / "i.gguf", None):
        out = tmp_path / f"{imatrix and imatrix.suffix}.mkd"
        convert(model, out, imatrix=imatrix)
        merge(out, out.with_suffix(".out"))
        results.append(read_tensors(out.with_suffix(".out")))
    assert results[0] == results[1]
    assert {k for k, _, _ in results[0].values()} == {"Q4_0", "F32"}  # no ffn_down became Q4_1
    changed = {n for n in results[0] if results[0][n] != results[2][n]}
    assert changed and changed <= set(entries)
    assert read_manifest(tmp_path / ".gguf.mkd").options["imatrix"]["name"] == "i.gguf"


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0", b"\1\0\0\0\x05\0\0\0hello\1\0\0\0\xff\xff\xff\x7f", b"\xff" * 64])
def test_damaged_imatrix(model: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(MkdeployError, match=r"i\.dat"):
        convert(model, tmp_path / "p.mkd", imatrix=tmp_path / "i.dat")


def test_imatrix_of_another_model(model: Path, tmp_path: Path) -> None:
    write_dat(tmp_path / "i.dat", {"blk.0.attn_q.weight": np.ones(7, np.float32)})
    with pytest.raises(MkdeployError, match="has 7 values; expected 64"):
        convert(model, tmp_path / "p.mkd", imatrix=tmp_path / "i.dat")
    write_dat(tmp_path / "i.dat", {"other": np.ones(7, np.float32)})
    with pytest.raises(MkdeployError, match="no entry fits this model"):
        convert(model, tmp_path / "p.mkd", imatrix=tmp_path / "i.dat")


def test_types_that_need_an_imatrix(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample(n_embd=256, n_ff=256))
    with pytest.raises(MkdeployError, match="needs an importance matrix; give --imatrix"):
        convert(model, tmp_path / "p.mkd", expert_type="iq2_xs")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_type": "q9_9"}, "--expert-type 'q9_9'"),
        ({"resident_type": "q8_1"}, "--resident-type 'q8_1'"),
        ({"shard_bytes": 0}, "--shard-size is 0"),
        ({"layout": "odd"}, "--layout 'odd'"),
    ],
)
def test_options_that_make_no_sense(model: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        convert(model, tmp_path / "p.mkd", **options)


def test_what_llama_cpp_refuses_is_one_line_with_its_last_words(tmp_path: Path) -> None:
    """An architecture that it does not know."""
    model = write_sample(tmp_path / "m.gguf", Sample(arch="nosuch"))
    with pytest.raises(MkdeployError) as caught:
        convert(model, tmp_path / "p.mkd")
    assert "unknown model architecture" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_metadata_survives_unchanged(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "p.mkd")
    before, after = gguf.GGUFReader(model).fields, gguf.GGUFReader(tmp_path / "p.mkd" / "resident.gguf").fields
    assert after["test.words"].contents() == ["", "naïve", "日本"]
    assert [k for k in after if not k.startswith("mkd.")][: len(before)] == list(before)
    assert after["mkd.tensor_names"].contents() == [t.name for t in gguf.GGUFReader(model).tensors]
    assert inspect(tmp_path / "p.mkd", verify=True).verified
