"""The phone's mkd-run: which variant a phone needs, and where it lies here.

Job: phone -> variant -> file. Choice: the name on the phone carries the file's own hash, so that a changed build is a
new file and an unchanged one is never sent again. What it does not do: build (`make android`) or send (push.py).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mkdeploy.device.phone import WORK_ROOT, PhoneInfo
from mkdeploy.errors import MkdeployError
from mkdeploy.native import mkd_run_path, native_dir

BIN_DIR = f"{WORK_ROOT}/bin"
HASH_DIGITS = 12


def variant_for(info: PhoneInfo) -> str:
    """dotprod, i8mm or host.

    Raises:
        MkdeployError: nothing that we build runs there.
    """
    if info.abi == "x86_64" and info.emulated == "native":
        return "host"
    if info.abi == "arm64-v8a":
        if "i8mm" in info.features:
            return "i8mm"
        if "asimddp" in info.features:
            return "dotprod"
        raise MkdeployError(
            f"{info.name}: its processor lacks dot products (asimddp); expected an arm64 phone of 2018 or later"
        )
    raise MkdeployError(f"{info.name}: its ABI is '{info.abi}'; expected arm64-v8a")


@dataclass(frozen=True)
class Binary:
    """A build of mkd-run."""

    variant: str
    path: Path
    sha256: str

    @property
    def on_phone(self) -> str:
        """Its path on the phone."""
        return f"{BIN_DIR}/mkd-run-{self.sha256[:HASH_DIGITS]}-{self.variant}"


def find_binary(info: PhoneInfo) -> Binary:
    """The build that this phone needs. A phone with i8mm takes dotprod where only that was built.

    Raises:
        MkdeployError: not built, or no build fits.
    """
    variant = variant_for(info)
    if variant == "host":
        return _binary(variant, mkd_run_path())
    for name in (variant, "dotprod"):
        path = native_dir() / "android" / f"mkd-run-{name}"
        if path.is_file():
            return _binary(name, path)
    missing = native_dir() / "android" / f"mkd-run-{variant}"
    raise MkdeployError(f"the phone's engine is not built: {missing} is missing; run `make android`")


def _binary(variant: str, path: Path) -> Binary:
    with path.open("rb") as file:
        return Binary(variant, path, hashlib.file_digest(file, "sha256").hexdigest())
