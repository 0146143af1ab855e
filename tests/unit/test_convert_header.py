"""The strict GGUF parser reads what it accepts like the gguf library; anything else is a one-line error."""

import random
import struct
from pathlib import Path

import gguf
import pytest

from mkdeploy.convert.pipeline import convert
from mkdeploy.errors import MkdeployError
from mkdeploy.ggml_types import TYPE_BY_ID
from mkdeploy.gguf_io import encode_header, kv_str, kv_str_list, kv_u32, kv_u64_list, read_header
from tests.unit.convert_samples import Sample, read_tensors, write_sample

SEED = 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "m.gguf")


def refuse(path: Path, *words: str) -> str:
    """The error that convert gives for a source: one line with the file and the words; nothing is left behind."""
    out = path.with_name("out.mkd")
    with pytest.raises(MkdeployError) as caught:
        convert(path, out)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    for word in words:
        assert word in message, message
    assert not out.exists()
    assert not list(path.parent.glob("*.partial"))
    return message


def test_header_equals_the_gguf_library(model: Path) -> None:
    header, reader = read_header(model), gguf.GGUFReader(model)
    keys = [k for k in reader.fields if not k.startswith("GGUF.")]
    assert [kv.key for kv in header.kvs] == keys
    for key in keys:
        assert header.by_key[key].value() == reader.fields[key].contents(), key
    theirs = [(t.name, t.tensor_type.name, tuple(map(int, t.shape)), t.n_bytes, t.data_offset) for t in reader.tensors]
    assert [(t.name, t.type.name, t.ne, t.n_bytes, t.offset) for t in header.tensors] == theirs


def test_encoded_header_is_read_by_the_gguf_library(tmp_path: Path) -> None:
    path = tmp_path / "e.gguf"
    kvs = [
        kv_str("general.architecture", "é"),
        kv_u32("general.alignment", 4096),
        kv_u64_list("a", [1, 2**64 - 1]),
        kv_str_list("b", ["", "x"]),
    ]
    head = encode_header(kvs, [("t", (4, 2), TYPE_BY_ID[0]), ("u", (32,), TYPE_BY_ID[2])], 4096)
    path.write_bytes(head + bytes(range(32)).ljust(4096, b"\0") + bytes(18))
    reader = gguf.GGUFReader(path)
    assert reader.fields["a"].contents() == [1, 2**64 - 1]
    assert reader.fields["b"].contents() == ["", "x"]
    assert [t.data_offset for t in reader.tensors] == [len(head), len(head) + 4096]
    assert read_tensors(path)["t"][2] == bytes(range(32))


def test_missing_file(tmp_path: Path) -> None:
    refuse(tmp_path / "no.gguf", "does not exist")


def test_folder(tmp_path: Path) -> None:
    folder = tmp_path / "d.gguf"
    folder.mkdir()
    refuse(folder, "is a folder")


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04" + bytes(100), b"lmgg" + bytes(100)])
def test_not_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    refuse(path)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 2**31 + 1])
def test_other_version(model: Path, version: int) -> None:
    data = bytearray(model.read_bytes())
    data[4:8] = struct.pack("<I", version)
    model.write_bytes(data)
    refuse(model, str(version), "expected 3")


def test_big_endian(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[4:8] = struct.pack(">I", 3)
    model.write_bytes(data)
    refuse(model, "big-endian", "little-endian")


@pytest.mark.parametrize("where", [5, 20, 30, 200, "infos", "data start", "last byte"])
def test_truncated(model: Path, where: int | str) -> None:
    header = read_header(model)
    last = header.tensors[-1]
    places = {
        "infos": header.data_offset - 200,
        "data start": header.data_offset,
        "last byte": last.offset + last.n_bytes - 1,
    }
    size = places[where] if isinstance(where, str) else where
    model.write_bytes(model.read_bytes()[:size])
    refuse(model, "download or convert it again")


@pytest.mark.parametrize(("offset", "what"), [(8, "tensors"), (16, "metadata pairs")])
@pytest.mark.parametrize("count", [2**20, 2**40, 2**63, 2**64 - 1])
def test_absurd_count(model: Path, offset: int, what: str, count: int) -> None:
    data = bytearray(model.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", count)
    model.write_bytes(data)
    refuse(model, what, str(count))


def test_absurd_key_length_in_a_huge_sparse_file(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[24:32] = struct.pack("<Q", 2**35)
    model.write_bytes(data)
    with open(model, "r+b") as f:
        f.truncate(2**36)
    refuse(model, "metadata key 0")


@pytest.mark.parametrize("n_dims", [0, 5, 2**32 - 1])
def test_absurd_n_dims(model: Path, n_dims: int) -> None:
    data = bytearray(model.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    data[at : at + 4] = struct.pack("<I", n_dims)
    model.write_bytes(data)
    refuse(model, "token_embd.weight", "dimensions")


def test_duplicate_tensor(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    refuse(model, "appears twice")


def test_tensor_at_the_wrong_offset(model: Path) -> None:
    data = bytearray(model.read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    data[at : at + 8] = struct.pack("<Q", 32)
    model.write_bytes(data)
    refuse(model, "output_norm.weight", "expected")


def test_header_mutations_never_escape(tmp_path: Path) -> None:
    """Seeded byte flips in the header: our error or success, nothing else."""
    model = write_sample(tmp_path / "f.gguf", Sample(n_layer=1))
    header = read_header(model)
    good = model.read_bytes()
    rng = random.Random(SEED)
    n_ok = 0
    for _ in range(800):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data[rng.randrange(header.data_offset)] = rng.randrange(256)
        with open(model, "r+b") as f:
            f.write(data[: header.data_offset])
        try:
            for kv in read_header(model).kvs:
                kv.value()
            n_ok += 1
        except MkdeployError as e:
            assert "\n" not in str(e)
    assert n_ok > 50, f"seed {SEED}: the mutations never leave a readable file, so they test little"


def test_mutated_headers_convert_or_fail_cleanly(tmp_path: Path) -> None:
    """The same through all of convert, without quantising."""
    model = write_sample(tmp_path / "f.gguf", Sample(n_layer=1))
    header = read_header(model)
    good = model.read_bytes()
    rng = random.Random(SEED + 1)
    for i in range(100):
        data = bytearray(good)
        data[rng.randrange(24, header.data_offset)] = rng.randrange(256)
        model.write_bytes(data)
        try:
            convert(model, tmp_path / f"{i}.mkd", keep_types=True)
        except MkdeployError as e:
            assert "\n" not in str(e)
    assert not list(tmp_path.glob("*.partial"))
