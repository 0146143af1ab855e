"""The stages of native/ depend on each other in one direction: any `#include "..."` against it fails here.

The table is the architecture (native/FLOW.md says why): a stage may include itself and the stages listed here. To add
an arrow, change the table, in a commit that says why.
"""

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"

# stage -> the stages whose headers it may include; `include` holds the public headers.
_COMMON = {"base", "include"}
_ENGINE = {"io", "store", "cache", "prefetch", "backend", "model", "speculative"}
ALLOWED: dict[str, set[str]] = {
    "include": set(),
    "base": {"include"},
    "cache": {"base"},  # it sees numbers, not files
    "speculative": {"base"},  # likewise
    "io": _COMMON,
    "store": {"io"} | _COMMON,
    "prefetch": {"store", "cache"} | _COMMON,
    "backend": {"prefetch", "store", "cache"} | _COMMON,
    "model": {"backend", "store", "cache", "io"} | _COMMON,
    "session": _ENGINE | _COMMON,
    "c_api": {"session"} | _ENGINE | _COMMON,
    "tools": {"c_api", "session"} | _ENGINE | _COMMON,
}

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_SOURCE_SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp"}


def stage_of(path: Path, native: Path) -> str:
    """The first folder below native/ (`.` for a file that lies directly in it)."""
    parts = path.relative_to(native).parts
    return parts[0] if len(parts) > 1 else "."


def target_stage(include: str, source: Path, native: Path) -> str | None:
    """The stage an include leads to; None if it is not one of native/'s own headers (ggml, llama.cpp)."""
    for root in (source.parent, native, native / "include"):
        candidate = (root / include).resolve()
        if candidate.is_file() and candidate.is_relative_to(native):
            return stage_of(candidate, native)
    return None


def forbidden_includes(native: Path) -> list[str]:
    """Every include that goes against the table, as `file: "header" (stage -> stage)`."""
    wrong = []
    for source in sorted(native.rglob("*")):
        if source.suffix not in _SOURCE_SUFFIXES or not source.is_file():
            continue
        stage = stage_of(source, native)
        for include in _INCLUDE.findall(source.read_text(encoding="utf-8")):
            target = target_stage(include, source, native)
            if target is not None and target != stage and target not in ALLOWED.get(stage, set()):
                wrong.append(f'{source.relative_to(native)}: "{include}" ({stage} -> {target})')
    return wrong


def test_every_include_in_native_follows_the_table() -> None:
    assert forbidden_includes(NATIVE) == []


def test_every_folder_with_sources_is_a_stage_of_the_table() -> None:
    folders = {stage_of(p, NATIVE) for p in NATIVE.rglob("*") if p.suffix in _SOURCE_SUFFIXES and p.is_file()}
    assert folders, "native/ holds no sources"
    assert folders - set(ALLOWED) == set()


@pytest.mark.parametrize(
    ("source", "include", "is_wrong"),
    [
        ("backend/b.cpp", "store/s.h", False),
        ("backend/b.cpp", "base/x.h", False),
        ("backend/b.cpp", "mkd.h", False),
        ("backend/b.cpp", "ggml-backend.h", False),
        ("store/s2.cpp", "../store/s.h", False),
        ("cache/c.cpp", "base/x.h", False),
        ("cache/c.cpp", "store/s.h", True),
        ("cache/c.cpp", "mkd.h", True),
        ("io/i.cpp", "../store/s.h", True),
        ("store/s2.cpp", "session/z.h", True),
        ("base/y.h", "store/s.h", True),
        ("newcomer/n.cpp", "store/s.h", True),
    ],
)
def test_the_reader_finds_arrows_against_the_table(tmp_path: Path, source: str, include: str, is_wrong: bool) -> None:
    native = tmp_path / "native"
    for header in ("store/s.h", "base/x.h", "session/z.h", "include/mkd.h"):
        (native / header).parent.mkdir(parents=True, exist_ok=True)
        (native / header).write_text("")
    (native / source).parent.mkdir(parents=True, exist_ok=True)
    (native / source).write_text(f'// a comment\n#  include "{include}"\n')
    assert bool(forbidden_includes(native)) == is_wrong
