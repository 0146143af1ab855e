"""bindings/signatures.py says what mkd.h says: names, argument types, struct fields and enum values.

The header is parsed by a few regular expressions, which suffice because its style is fixed (STYLE §3); a construct they
do not know makes the test fail rather than pass.
"""

import ctypes
import re
from ctypes import (
    POINTER,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import fields
from enum import IntEnum
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from mkdeploy.bindings import signatures
from mkdeploy.engine import info as engine_info
from mkdeploy.errors import MkdeployError

HEADER = Path(__file__).resolve().parents[2] / "native" / "include" / "mkd.h"
TEXT = re.sub(r"^\s*#.*$", "", re.sub(r"//[^\n]*", "", HEADER.read_text("utf-8")), flags=re.M)

SCALARS: dict[str, Any] = {
    **{"bool": c_bool, "char": c_char, "float": c_float, "double": c_double, "size_t": c_size_t},
    **{"int8_t": c_int8, "int32_t": c_int32, "int64_t": c_int64, "uint32_t": c_uint32, "uint64_t": c_uint64},
    **{"mkd_session_t": c_void_p, "mkd_store_t": c_void_p},
}


def to_ctypes(declaration: str) -> Any:
    """The ctypes type of a C type as mkd.h writes it, for example `const char * const *`."""
    words = re.findall(r"\w+|\*", declaration.replace("const", " "))
    stars = words.count("*")
    words = [word for word in words if word != "*"]
    if words == ["void"]:
        return c_void_p if stars else None
    if words == ["char"] and stars:
        words, base, stars = [], c_char_p, stars - 1
    elif words[0] == "struct":
        base = getattr(signatures, words[1])
    elif words[0] == "enum":
        base = c_int
    elif words == ["mkd_token_callback"]:
        base = signatures.mkd_token_callback
    else:
        base = SCALARS[words[0]]
    for _ in range(stars):
        base = POINTER(base)
    return base


def split_declaration(text: str) -> tuple[str, str]:
    """`const int32_t * ids` -> (`const int32_t *`, `ids`)."""
    match = re.fullmatch(r"(.*?)(\w+)", text.strip(), re.S)
    assert match, text
    return match[1].strip(), match[2]


def header_functions() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    functions = {}
    for declaration in re.findall(r"MKD_API\s+([^;{}]*?\([^;{}]*?\));", TEXT):
        head, arguments = declaration.split("(", 1)
        result, name = split_declaration(head)
        parts = [part for part in arguments.rstrip(")").split(",") if part.strip() != "void"]
        functions[name] = (to_ctypes(result), tuple(to_ctypes(split_declaration(part)[0]) for part in parts))
    return functions


def header_structs() -> dict[str, list[tuple[str, Any]]]:
    structs = {}
    for name, body in re.findall(r"\nstruct (\w+) \{(.*?)\n\};", TEXT, re.S):
        members: list[tuple[str, Any]] = []
        for member in filter(None, (part.strip() for part in body.split(";"))):
            callback = re.fullmatch(r"void \(\*(\w+)\)\s*\((.*)\)", member, re.S)
            array = re.fullmatch(r"char\s+(\w+)\[(\d+)\]", member)
            if callback:
                arguments = [to_ctypes(split_declaration(part)[0]) for part in callback[2].split(",")]
                members.append((callback[1], (None, *arguments)))
            elif array:
                members.append((array[1], c_char * int(array[2])))
            else:
                first, *more = member.split(",")
                kind, first_name = split_declaration(first)
                members += [(field.strip(), to_ctypes(kind)) for field in (first_name, *more)]
        structs[name] = members
    return structs


def header_enums() -> dict[str, dict[str, int]]:
    enums = re.findall(r"\nenum (\w+) \{(.*?)\n\};", TEXT, re.S)
    return {name: {n: int(v) for n, v in re.findall(r"(\w+)\s*=\s*(-?\d+)", body)} for name, body in enums}


def test_functions_have_the_headers_names_order_and_types() -> None:
    assert len(header_functions()) == TEXT.count("MKD_API"), "a declaration that this parser does not know"
    assert list(signatures.FUNCTIONS) == list(header_functions())
    for name, expected in header_functions().items():
        assert signatures.FUNCTIONS[name] == expected, name


def test_structs_have_the_headers_fields_in_order() -> None:
    structs = header_structs()
    ours = {n: v for n, v in vars(signatures).items() if isinstance(v, type) and issubclass(v, ctypes.Structure)}
    assert set(ours) - {"Structure"} == set(structs)
    for name, members in structs.items():
        seen = [
            (field, (kind._restype_, *kind._argtypes_) if issubclass(kind, ctypes._CFuncPtr) else kind)
            for field, kind in ours[name]._fields_
        ]
        assert seen == members, name


def test_token_callback_has_the_headers_type() -> None:
    match = re.search(r"typedef bool \(\*mkd_token_callback\)\((.*?)\);", TEXT, re.S)
    assert match
    kinds = [to_ctypes(split_declaration(part)[0]) for part in match[1].split(",")]
    kinds[1] = c_void_p  # the text is not zero-terminated: c_char_p would read on
    assert signatures.mkd_token_callback._argtypes_ == tuple(kinds)
    assert signatures.mkd_token_callback._restype_ is c_bool


def test_every_enum_of_the_header_is_bound_with_its_values() -> None:
    bound = [kind for kind in vars(signatures).values() if isinstance(kind, type) and issubclass(kind, IntEnum)]
    names = {kind: "mkd" + re.sub("(?=[A-Z])", "_", kind.__name__).lower() for kind in bound if kind is not IntEnum}
    ours = {name: {member.name: member.value for member in kind} for kind, name in names.items()}
    assert ours == header_enums()


@pytest.mark.parametrize("name", ["MKD_ABI_VERSION", "MKD_ALIGN_BYTES"])
def test_constants_have_the_headers_values(name: str) -> None:
    match = re.search(rf"#define {name} (\d+)", HEADER.read_text("utf-8"))
    assert match and getattr(signatures, name) == int(match[1])


@pytest.mark.parametrize(
    ("cls", "struct"),
    [
        (engine_info.ModelInfo, signatures.mkd_model_info),
        (engine_info.MemoryInfo, signatures.mkd_memory_info),
        (engine_info.LoadInfo, signatures.mkd_load_info),
        (engine_info.Stats, signatures.mkd_stats),
    ],
)
def test_reporting_dataclasses_mirror_their_structs(cls: type, struct: type[ctypes.Structure]) -> None:
    assert [field.name for field in fields(cls)] == [name for name, *_ in struct._fields_]
    for (_, kind, *_), python in zip(struct._fields_, get_type_hints(cls).values(), strict=True):
        expected = bool if kind is c_bool else str if issubclass(kind, ctypes.Array) else int
        assert python is expected


def test_another_abi_version_is_refused() -> None:
    class AbiVersion:
        restype: Any = None
        argtypes: Any = None

        def __call__(self) -> int:
            return 99

    class Foreign:
        mkd_abi_version = AbiVersion()

    with pytest.raises(MkdeployError, match=r"libmkd\.so has ABI version 99; this toolkit needs 2"):
        signatures.bind(Foreign(), Path("libmkd.so"))  # type: ignore[arg-type]


def test_a_library_without_the_functions_is_refused() -> None:
    with pytest.raises(MkdeployError, match="not this toolkit's engine"):
        signatures.bind(ctypes.CDLL(None), Path("other.so"))


def test_copies_of_ggml_are_found_in_the_memory_map() -> None:
    line = "7f00-7f01 r-xp 00000000 fe:00 1234    {}\n"
    maps = (
        line.format("/a/lib/libggml-base.so.0.25.3") + line.format("/b/libggml-base.so.0") + line.format("/b/libc.so.6")
    )
    assert signatures.ggml_copies(maps) == {Path("/a/lib"), Path("/b")}


def test_a_report_with_a_missing_field_names_it() -> None:
    with pytest.raises(MkdeployError, match="loaded lacks 'n_requests'"):
        engine_info.from_mapping(engine_info.Stats, {"n_decode": 1, "n_tokens": 1}, "loaded")
