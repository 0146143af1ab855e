"""push: only what differs, checked there, resumable; and what a hostile cable, disk or name can do to it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkdeploy import cli
from mkdeploy.convert.pipeline import convert
from mkdeploy.device.adb import Device, connect
from mkdeploy.device.push import MANIFEST, PACKAGES_DIR, package_files, push
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import MkdeployError, NoPhoneError, UsageError
from tests.emulation.phones import emulated

FOLDER = f"{PACKAGES_DIR}/m.mkd"


@pytest.fixture(scope="module")
def package(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("push") / "m.mkd"
    convert(smolmoe_f16, path, resident_type="q8_0", expert_type="q4_0", shard_bytes=8 << 20)
    return path


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def sizes(package: Path) -> dict[str, int]:
    return {file.name: file.n_bytes for file in package_files(package)}


def test_a_push_and_a_second_one(package: Path, device: Device, phone: EmulatedPhone, sizes: dict[str, int]) -> None:
    before = phone.stats.received_bytes
    planned = push(package, device, dry_run=True)
    assert planned.sent_bytes == sum(sizes.values())
    assert phone.stats.received_bytes == before
    result = push(package, device)
    assert result.path == FOLDER
    assert (result.sent_bytes, result.skipped_bytes) == (sum(sizes.values()), 0)
    assert phone.stats.received_bytes - before == sum(sizes.values())
    assert hashes(phone.path(FOLDER)) == hashes(package)
    again = push(package, device)
    assert (again.sent_bytes, again.skipped_bytes) == (0, sum(sizes.values()))
    assert phone.stats.received_bytes - before == sum(sizes.values())


def test_only_what_differs_is_sent(package: Path, device: Device, phone: EmulatedPhone, sizes: dict[str, int]) -> None:
    push(package, device)
    shards = sorted(name for name in sizes if "experts" in name)
    changed, missing = phone.path(f"{FOLDER}/{shards[1]}"), phone.path(f"{FOLDER}/{shards[2]}")
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1  # same size, another content
    changed.write_bytes(data)
    missing.unlink()
    result = push(package, device)
    assert {f["name"] for f in result.files if f["action"] == "sent"} == {shards[1], shards[2], MANIFEST}
    assert hashes(phone.path(FOLDER)) == hashes(package)


@pytest.mark.parametrize("at_share", [0.05, 0.5, 0.98])
def test_a_push_that_was_cut_off_goes_on(
    package: Path, phone: EmulatedPhone, sizes: dict[str, int], at_share: float
) -> None:
    total = sum(sizes.values())
    before = phone.stats.received_bytes
    phone.set_faults([f"disconnect={int(total * at_share)}"])
    with pytest.raises(NoPhoneError, match="push again: whole files are kept"), connect(phone.serial) as device:
        push(package, device)
    assert not phone.path(f"{FOLDER}/{MANIFEST}").exists()  # half a package is no package
    kept = {path.name for path in phone.path(FOLDER).iterdir() if not path.name.startswith(".")}
    with connect(phone.serial) as device:
        result = push(package, device)
        assert {f["name"] for f in result.files if f["action"] == "skipped"} == kept
        assert result.sent_bytes == total - sum(sizes[name] for name in kept)
        assert phone.stats.received_bytes - before <= total + max(sizes.values())
        assert hashes(phone.path(FOLDER)) == hashes(package)
        assert push(package, device).sent_bytes == 0


def test_a_killed_push_goes_on(package: Path, phone: EmulatedPhone) -> None:
    phone.set_faults(["slow-link=60000000"])
    words = [sys.executable, "-m", "mkdeploy", "push", str(package), "--serial", phone.serial]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while phone.stats.received_bytes == 0 or not list(phone.path(PACKAGES_DIR).glob("*/*")):
        assert child.poll() is None
    child.kill()
    child.wait()
    phone.set_faults(())
    with connect(phone.serial) as device:
        push(package, device)
    assert hashes(phone.path(FOLDER)) == hashes(package)


def test_a_byte_that_flips_on_the_way_is_sent_again(package: Path, device: Device, phone: EmulatedPhone) -> None:
    before = phone.stats.received_bytes
    phone.set_faults(["corrupt=3"])
    result = push(package, device)
    assert hashes(phone.path(FOLDER)) == hashes(package)
    assert phone.stats.received_bytes - before > result.sent_bytes


def test_a_package_that_is_damaged_here_never_becomes_one_there(
    package: Path, device: Device, phone: EmulatedPhone, tmp_path: Path
) -> None:
    damaged = tmp_path / "m.mkd"
    shutil.copytree(package, damaged)
    shard = sorted(damaged.glob("*experts*"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(MkdeployError, match=r"its sha256 on the phone .* after 2 tries"):
        push(damaged, device)
    assert not phone.path(f"{FOLDER}/{MANIFEST}").exists()


def test_no_space_is_known_before_and_survived_after(package: Path, device: Device, phone: EmulatedPhone) -> None:
    phone.set_faults(["full"])
    before = phone.stats.received_bytes
    with pytest.raises(MkdeployError, match=r"free .* there \(or --force\)"):
        push(package, device)
    assert phone.stats.received_bytes == before
    phone.set_faults(["no-space=30000000"])
    with pytest.raises(MkdeployError, match="No space left on device"):
        push(package, device)
    assert not list(phone.path(FOLDER).glob(".*.part"))
    phone.set_faults(())
    push(package, device)
    assert hashes(phone.path(FOLDER)) == hashes(package)


def test_prune_removes_only_from_the_packages_folder(package: Path, device: Device, phone: EmulatedPhone) -> None:
    push(package, device)
    (phone.path(FOLDER) / "old shard.gguf").write_bytes(b"x")
    (phone.path(FOLDER) / ".part of long ago.part").write_bytes(b"x")
    neighbour = phone.path(PACKAGES_DIR) / "other.mkd"
    neighbour.mkdir()
    assert push(package, device).removed == []
    assert push(package, device, prune=True, dry_run=True).removed == [".part of long ago.part", "old shard.gguf"]
    assert push(package, device, prune=True).removed == [".part of long ago.part", "old shard.gguf"]
    assert hashes(phone.path(FOLDER)) == hashes(package)
    assert neighbour.exists()


@pytest.mark.parametrize("name", ["a b.mkd", "$(touch x).mkd", "'q'.mkd", "-rf.mkd", "ü;reboot.mkd"])
def test_names_reach_the_phone_as_they_are(
    package: Path, device: Device, phone: EmulatedPhone, tmp_path: Path, name: str
) -> None:
    odd = tmp_path / name
    shutil.copytree(package, odd)
    push(odd, device)
    assert hashes(phone.path(f"{PACKAGES_DIR}/{name}")) == hashes(package)
    assert push(odd, device).sent_bytes == 0


@pytest.mark.parametrize("to", ["/sdcard/x", "/storage/emulated/0", "/mnt/y", "relative", "/data/../sdcard"])
def test_targets_that_cannot_work_are_refused(package: Path, device: Device, to: str) -> None:
    with pytest.raises(UsageError, match=r"FUSE storage, where O_DIRECT fails|expected an absolute path"):
        push(package, device, to=to)


def test_force_overrides(package: Path, device: Device, phone: EmulatedPhone) -> None:
    push(package, device, to="/sdcard/p", force=True)
    assert hashes(phone.path("/sdcard/p/m.mkd")) == hashes(package)


def test_the_command(package: Path, phone: EmulatedPhone, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["push", str(package), "--serial", phone.serial, "--json"]
    assert cli.main(words) == 0
    first = json.loads(capfd.readouterr().out)
    assert first["sent_bytes"] == sum(file["bytes"] for file in first["files"])
    assert any(file["name"].startswith("mkd-run-") for file in first["files"])
    assert phone.serial not in json.dumps({key: value for key, value in first.items() if key != "via"})
    assert cli.main(words) == 0
    assert json.loads(capfd.readouterr().out)["sent_bytes"] == 0
    assert cli.main(["push", str(package), "--serial", "127.0.0.1:1"]) == 3
    assert "no phone at 127.0.0.1:1" in capfd.readouterr().err
    assert cli.main(["push", str(package / "none"), "--serial", phone.serial]) == 1


@pytest.fixture(scope="module")
def old_phone() -> Iterator[EmulatedPhone]:
    with emulated(native=True, features=(), version=0x01000000) as phone:
        yield phone


def test_an_old_phone_is_pushed_to(package: Path, old_phone: EmulatedPhone) -> None:
    with connect(old_phone.serial) as device:
        push(package, device)
        assert push(package, device).sent_bytes == 0
    assert hashes(old_phone.path(FOLDER)) == hashes(package)
    assert os.listdir(old_phone.path(PACKAGES_DIR)) == ["m.mkd"]
