"""manifest.json is untrusted: any JSON gives a valid `Manifest` or one line."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mkdeploy.errors import MkdeployError
from mkdeploy.package.manifest import Manifest, dump_manifest, parse_manifest, read_manifest

HASH = "0123456789abcdef" * 4


def good() -> dict[str, Any]:
    """The example of docs/package-format.md, complete."""
    return {
        "format": "mkdeploy-package",
        "format_version": 1,
        "package_id": HASH,
        "layout": "plain",
        "model": {
            "name": "smolmoe",
            "arch": "granitemoe",
            "n_layer": 30,
            "n_layer_nextn": 0,
            "n_moe_layer": 1,
            "n_expert": 32,
            "n_expert_used": 8,
        },
        "source": {"files": [{"name": "smolmoe-f16.gguf", "bytes": 273107040, "sha256": HASH}], "types": {"F16": 280}},
        "options": {"keep_types": False, "imatrix": None},
        "layers": [
            {
                "layer": 0,
                "n_expert": 32,
                "payload_bytes": 31104,
                "stride_bytes": 36864,
                "tensors": [
                    {"role": "up", "type": "Q4_0", "ne": [576, 32], "bytes": 10368, "offset_bytes": 0},
                    {"role": "gate", "type": "Q4_0", "ne": [576, 32], "bytes": 10368, "offset_bytes": 12288},
                    {"role": "down", "type": "Q4_0", "ne": [32, 576], "bytes": 10368, "offset_bytes": 24576},
                ],
            }
        ],
        "draft": None,
        "files": [
            {"name": "resident.gguf", "kind": "resident", "bytes": 1, "sha256": HASH},
            {"name": "experts-00001-of-00001.gguf", "kind": "experts", "bytes": 2, "sha256": HASH},
        ],
        "created_by": "mkdeploy 0.1.0",
    }


def parse(data: Any) -> Manifest:
    return parse_manifest(json.dumps(data), "m.json")


def paths_of(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(p for key, value in items for p in paths_of(value, (*path, key)))]


PATHS = [p for p in paths_of(good()) if p]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["..", "/etc/passwd", HASH]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_the_documented_example_is_valid_and_survives_a_round_trip() -> None:
    manifest = parse(good())
    assert manifest.layers[0].tensors[2].ne == (32, 576)
    assert parse_manifest(dump_manifest(manifest), "again") == manifest
    assert json.loads(dump_manifest(manifest)) == good()


@settings(max_examples=200, deadline=None)
@given(ANY_JSON)
def test_any_json_gives_one_line(value: Any) -> None:
    with pytest.raises(MkdeployError) as caught:
        parse(value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_one_line(data: bytes) -> None:
    with pytest.raises(MkdeployError) as caught:
        parse_manifest(data, "m.json")
    assert str(caught.value).startswith("m.json")
    assert "\n" not in str(caught.value)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATHS), ANY_JSON)
def test_any_value_anywhere_gives_a_manifest_or_one_line(path: tuple[Any, ...], value: Any) -> None:
    data = good()
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    try:
        manifest = parse(data)
    except MkdeployError as e:
        assert "\n" not in str(e)
        return
    assert parse_manifest(dump_manifest(manifest), "again") == manifest


@pytest.mark.parametrize("path", [p for p in PATHS if isinstance(p[-1], str) and p[0] not in ("options",)])
def test_a_missing_key_is_named(path: tuple[Any, ...]) -> None:
    data = good()
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    if path == ("source", "types", "F16"):
        return
    with pytest.raises(MkdeployError, match=str(path[-1])):
        parse(data)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"format": NaN}', "1e999", "\ufeff{}", "{", ""])
def test_hostile_json(text: str) -> None:
    with pytest.raises(MkdeployError):
        parse_manifest(text, "m.json")


@pytest.mark.parametrize("version", [0, 2, 1.0, "1", True, None])
def test_another_format_version_names_both(version: Any) -> None:
    data = good()
    data["format_version"] = version
    with pytest.raises(MkdeployError, match=r"format_version is .*reads version 1"):
        parse(data)


@pytest.mark.parametrize(
    "name", ["../resident.gguf", "/resident.gguf", "a/b.gguf", "..", "", ".x", "a\\b", "résident.gguf", "a\n"]
)
def test_unsafe_file_names(name: str) -> None:
    data = good()
    data["files"][0]["name"] = name
    with pytest.raises(MkdeployError, match="plain file name"):
        parse(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "n_expert_used"), 33),
        (("model", "n_moe_layer"), 2),
        (("model", "n_layer_nextn"), 30),
        (("layers", 0, "n_expert"), 31),
        (("layers", 0, "payload_bytes"), 31105),
        (("layers", 0, "stride_bytes"), 31104),
        (("layers", 0, "layer"), 30),
        (("layers", 0, "tensors", 1, "offset_bytes"), 10368),
        (("layers", 0, "tensors", 1, "bytes"), 10367),
        (("layers", 0, "tensors", 1, "role"), "up"),
        (("layers", 0, "tensors", 1, "type"), "Q4_X"),
        (("layers", 0, "tensors", 1, "ne"), [570, 32]),
        (("files", 1, "name"), "experts-00001-of-00002.gguf"),
        (("files", 1, "kind"), "draft"),
        (("layout",), "odd"),
        (("package_id",), HASH.upper()),
    ],
)
def test_contradictions_are_refused(path: tuple[Any, ...], value: Any) -> None:
    data: Any = copy.deepcopy(good())
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(MkdeployError):
        parse(data)


def test_places_that_are_no_package(tmp_path: Path) -> None:
    with pytest.raises(MkdeployError, match="does not exist"):
        read_manifest(tmp_path / "no.mkd")
    with pytest.raises(MkdeployError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(MkdeployError, match="is a file; expected a package folder"):
        read_manifest(tmp_path / "model.gguf")
