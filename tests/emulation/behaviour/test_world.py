"""What a program of the emulated phone sees: Android's userland, the profile's hardware, nothing of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import MkdeployError
from mkdeploy.native import native_dir

TMP = "/data/local/tmp"


def say(phone: EmulatedPhone, command: str) -> str:
    """stdout of a command of the phone, which must succeed."""
    result = phone.world.run(command)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


def test_properties_are_the_profiles(phone: EmulatedPhone) -> None:
    assert say(phone, "getprop ro.product.cpu.abi") == "arm64-v8a\n"
    assert say(phone, "getprop ro.mkdeploy.emulated") == "qemu\n"
    assert say(phone, "getprop ro.product.model") == phone.profile.phone.model + "\n"
    assert f"[ro.board.platform]: [{phone.profile.phone.platform}]" in say(phone, "getprop").splitlines()
    assert say(phone, "getprop no.such.property") == "\n"


def test_processors_and_memory_are_the_profiles(phone: EmulatedPhone) -> None:
    cpuinfo = say(phone, "cat /proc/cpuinfo")
    assert cpuinfo.count("processor\t: ") == 8
    features = next(line for line in cpuinfo.splitlines() if line.startswith("Features\t: "))
    assert "i8mm" in features.split()
    total_kib = int(say(phone, "grep MemTotal /proc/meminfo").split()[1])
    assert 0.9 * phone.profile.ram_bytes < total_kib * 1024 <= phone.profile.ram_bytes
    freq_khz = say(phone, "cat /sys/devices/system/cpu/cpu7/cpufreq/cpuinfo_max_freq")
    assert int(freq_khz) == phone.profile.phone.cores[-1].max_mhz * 1000
    assert say(phone, "cat /sys/class/power_supply/battery/status") in ("Discharging\n", "Full\n", "Charging\n")


def test_temperature_can_be_set_while_it_runs(phone: EmulatedPhone) -> None:
    zones = phone.profile.phone.thermal
    types = say(phone, "cat /sys/class/thermal/thermal_zone*/type").split()
    assert types == [zone.type for zone in zones]
    phone.set_temperature(61.5)
    assert set(say(phone, "cat /sys/class/thermal/thermal_zone*/temp").split()) == {"61500"}


def test_userland_is_androids(phone: EmulatedPhone) -> None:
    for name in ("sha256sum", "stat", "df", "cat", "ls", "mkdir", "mv", "rm", "kill", "nproc", "uname", "sync"):
        assert say(phone, f"ls /system/bin/{name}")
    assert "MIRBSD KSH" in say(phone, "echo $KSH_VERSION")
    assert say(phone, f"echo hello >{TMP}/h; sha256sum {TMP}/h").startswith(
        "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    )


def test_it_sees_nothing_of_this_machine(phone: EmulatedPhone, tmp_path: Path) -> None:
    (tmp_path / "host-file").touch()
    assert phone.world.run(f"ls {tmp_path}").returncode != 0
    assert phone.world.run("ls /root /home").returncode != 0
    pids = say(phone, "ls /proc").split()
    assert len([pid for pid in pids if pid.isdecimal()]) < 10
    assert phone.world.run(f"kill -0 {os.getpid()}").returncode != 0


def test_relative_paths_are_the_phones(phone: EmulatedPhone) -> None:
    """Every command starts in the phone's `/`, not in this machine's."""
    assert say(phone, "pwd") == "/\n"
    assert set(say(phone, "ls").split()) == {path.name for path in phone.root.iterdir() if path.name[0] != "."}
    assert phone.world.run(f"ls ../../../../../..{Path(__file__).parent}").returncode != 0


def test_it_cannot_change_this_machines_kernel_settings(phone: EmulatedPhone) -> None:
    """Opened for writing only: nothing is written, so a phone that fails this test harms nobody either."""
    for path in ("/proc/sys/vm/drop_caches", "/proc/sys/kernel/printk", "/proc/sysrq-trigger"):
        assert phone.world.run(f"exec 3>>{path}").returncode != 0, path


def test_direct_io_works_where_packages_go(phone: EmulatedPhone) -> None:
    (phone.path(TMP) / "direct").write_bytes(bytes(8192))
    fd = os.open(phone.path(f"{TMP}/direct"), os.O_RDONLY | os.O_DIRECT)
    os.close(fd)


def test_it_listens_on_loopback_only(phone: EmulatedPhone) -> None:
    port = int(phone.serial.rpartition(":")[2])
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    ]
    assert [address.partition(":")[0] for address in listening] == ["0100007F"]


def test_a_port_in_use_is_named(phone: EmulatedPhone) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MkdeployError, match=f"port {port} "):
            EmulatedPhone(port=port)


def test_aarch64_engine_runs_under_qemu(phone: EmulatedPhone) -> None:
    engine = native_dir() / "android" / "mkd-run-dotprod"
    if not engine.is_file():
        pytest.skip("needs the aarch64 engine: make android")
    shutil.copy2(engine, phone.path(f"{TMP}/mkd-run"))
    assert '"hello"' in say(phone, f"{TMP}/mkd-run info")


def test_native_phone_runs_this_machines_engine(make_phone: Callable[..., EmulatedPhone]) -> None:
    engine = native_dir() / "mkd-run"
    if not engine.is_file():
        pytest.skip("needs the engine: make native")
    phone = make_phone(native=True)
    assert say(phone, "getprop ro.product.cpu.abi").strip() in (platform.machine(), "arm64-v8a")
    assert say(phone, "getprop ro.mkdeploy.emulated") == "native\n"
    shutil.copy2(engine, phone.path(f"{TMP}/mkd-run"))
    assert '"hello"' in say(phone, f"{TMP}/mkd-run info")


def test_flash_rates_reach_the_engine_only_if_asked(make_phone: Callable[..., EmulatedPhone]) -> None:
    slow, fast = make_phone(throttle=True), make_phone(throttle=False)
    assert say(slow, "echo $MKD_THROTTLE").strip() == slow.profile.throttle_curve()
    assert say(fast, "echo $MKD_THROTTLE") == "\n"


def test_the_memory_limit_holds(make_phone: Callable[..., EmulatedPhone]) -> None:
    phone = make_phone(memory_bytes=64 << 20)
    if phone.memory_note:
        pytest.skip(phone.memory_note)
    result = phone.world.run(
        "a=0123456789abcdef; while [ ${#a} -lt 300000000 ]; do a=$a$a; done; echo kept", timeout_s=20
    )
    assert b"kept" not in result.stdout
    assert say(phone, "echo alive") == "alive\n"


def test_a_kept_root_is_found_again(make_phone: Callable[..., EmulatedPhone], tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = make_phone(root=root)
    say(first, f"echo kept >{TMP}/kept")
    first.close()
    assert say(make_phone(root=root), f"cat {TMP}/kept") == "kept\n"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(MkdeployError, match=r"thesis|other files"):
        EmulatedPhone(root=tmp_path)


def test_the_end_of_the_emulator_is_the_end_of_its_programs(make_phone: Callable[..., EmulatedPhone]) -> None:
    phone = make_phone()
    root = phone.root
    sleeper = subprocess.Popen(phone.world.shell("exec sleep 4321"))
    time.sleep(0.2)
    assert sleeper.poll() is None
    phone.close()
    sleeper.wait(5.0)
    assert not root.exists()
    phone.close()  # twice is no error


def _pids(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_emulator_and_its_programs(phone: EmulatedPhone, tmp_path: Path, number: int) -> None:
    """SIGKILL too: nothing of the emulator runs afterwards that could clean up."""
    root = tmp_path / "root"
    start = f"from mkdeploy.emulator.phone import emulate; emulate(port=0, root=Path({str(root)!r}))"
    code = f"from pathlib import Path; {start}"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline().startswith(b"127.0.0.1:")
        assert _pids(str(root))
        child.send_signal(number)
        assert child.wait(10) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
        deadline = time.monotonic() + 5
        while _pids(str(root)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _pids(str(root)) == []
    finally:
        child.kill()
        child.communicate()
