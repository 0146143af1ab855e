"""The emulated phone answers Debian's `adb` as a phone does: files, commands, their streams and exit status."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mkdeploy.emulator.phone import EmulatedPhone

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
TMP = "/data/local/tmp"
ALL_BYTES = bytes(range(256))


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(device: Run, marker: str) -> bool:
    """Whether a process of the phone has `marker` in its command line."""
    return marker in device("shell", "ps -ef").stdout.decode()


def test_devices_lists_the_phone_with_its_model(adb, device: Run, phone: EmulatedPhone) -> None:  # type: ignore[no-untyped-def]
    assert adb.state(phone.serial) == "device"
    rows = adb("devices", "-l").stdout.decode()
    assert f"model:{phone.profile.phone.model.replace(' ', '_')}" in rows
    assert device("get-state").stdout == b"device\n"


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exit_status_is_exact(device: Run, code: int) -> None:
    assert device("shell", f"exit {code}").returncode == code


def test_a_killed_command_has_128_plus_the_signal(device: Run) -> None:
    assert device("shell", "kill -9 $$").returncode == 137


def test_stdout_and_stderr_are_apart(device: Run) -> None:
    result = device("shell", "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


def test_exec_out_keeps_every_byte(device: Run, phone: EmulatedPhone) -> None:
    data = ALL_BYTES * 300
    phone.path(f"{TMP}/all-bytes").write_bytes(data)
    assert device("exec-out", f"cat {TMP}/all-bytes").stdout == data
    assert device("shell", f"cat {TMP}/all-bytes").stdout == data


def test_stdin_reaches_the_command_and_its_end_too(device: Run) -> None:
    data = ALL_BYTES * 1000
    assert device("shell", "cat", stdin=data).stdout == data
    assert device("shell", "sha256sum; echo done", stdin=b"").stdout.endswith(b"done\n")


def test_large_output_is_whole(device: Run) -> None:
    result = device("shell", "seq 1 700000")
    lines = result.stdout.split()
    assert (len(lines), lines[-1]) == (700000, b"700000")


def test_output_of_a_command_that_writes_to_both_streams_is_whole(device: Run) -> None:
    result = device("shell", "seq 1 50000; seq 1 50000 >&2; exit 3")
    assert len(result.stdout.split()) == len(result.stderr.split()) == 50000
    assert result.returncode == 3


def test_two_commands_run_at_the_same_time(adb, device: Run, phone: EmulatedPhone) -> None:  # type: ignore[no-untyped-def]
    """Each waits for the other: one after the other they would never end."""
    device("shell", f"cd {TMP}; rm -f a b; mkfifo a b")
    first = adb.popen("-s", phone.serial, "shell", f"cd {TMP}; cat a; echo from-first >b")
    second = adb.popen("-s", phone.serial, "shell", f"cd {TMP}; echo from-second >a; cat b")
    assert first.communicate(timeout=10)[0] == b"from-second\n"
    assert second.communicate(timeout=10)[0] == b"from-first\n"


def test_push_and_pull_of_a_large_file(device: Run, phone: EmulatedPhone, tmp_path: Path) -> None:
    data = random.Random(7).randbytes(24 << 20) + b"odd"
    source, back = tmp_path / "large", tmp_path / "back"
    source.write_bytes(data)
    before = phone.stats.received_bytes
    assert device("push", str(source), f"{TMP}/large").returncode == 0
    assert phone.stats.received_bytes - before == len(data)
    assert phone.path(f"{TMP}/large").read_bytes() == data
    assert device("pull", f"{TMP}/large", str(back)).returncode == 0
    assert back.read_bytes() == data


def test_push_and_pull_of_a_tree(device: Run, phone: EmulatedPhone, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    contents = {"a": b"", "deep/er/b": b"x" * 70000, "deep/name with space": b"1", "deep/ümlaut": b"2"}
    for name, data in contents.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    device("shell", f"rm -rf {TMP}/tree")
    assert device("push", str(tree), f"{TMP}/").returncode == 0
    assert {name: phone.path(f"{TMP}/tree/{name}").read_bytes() for name in contents} == contents
    assert device("pull", f"{TMP}/tree", str(tmp_path / "back")).returncode == 0
    assert {name: (tmp_path / "back" / name).read_bytes() for name in contents} == contents


def test_push_keeps_the_execute_bit_and_pull_a_keeps_the_time(
    device: Run, phone: EmulatedPhone, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/system/bin/sh\necho ran $1\n")
    script.chmod(0o755)
    device("push", str(script), f"{TMP}/script")
    assert device("shell", f"{TMP}/script it").stdout == b"ran it\n"
    assert abs(phone.path(f"{TMP}/script").stat().st_mtime - script.stat().st_mtime) < 2


def test_a_second_push_replaces_the_file(device: Run, phone: EmulatedPhone, tmp_path: Path) -> None:
    for data in (b"longer than the next", b"short"):
        (tmp_path / "f").write_bytes(data)
        assert device("push", str(tmp_path / "f"), f"{TMP}/replaced").returncode == 0
    assert phone.path(f"{TMP}/replaced").read_bytes() == b"short"


def test_stat_and_ls_agree_with_the_phones_own(device: Run, phone: EmulatedPhone) -> None:
    phone.path(f"{TMP}/sized").write_bytes(b"12345")
    assert device("shell", f"stat -c %s {TMP}/sized").stdout == b"5\n"
    rows = device("ls", TMP).stdout.decode().splitlines()
    sizes = {row.split()[3]: int(row.split()[1], 16) for row in rows if row}
    assert sizes["sized"] == 5
    assert {".", ".."} <= set(sizes)


def test_what_is_missing_is_an_error_that_names_it(device: Run, tmp_path: Path) -> None:
    result = device("pull", f"{TMP}/absent", str(tmp_path / "x"))
    assert result.returncode != 0
    assert b"absent" in result.stdout + result.stderr


def test_push_while_a_command_runs(adb, device: Run, phone: EmulatedPhone, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "f").write_bytes(bytes(4 << 20))
    shell = adb.popen("-s", phone.serial, "shell", "cat; echo end")
    try:
        assert device("push", str(tmp_path / "f"), f"{TMP}/during").returncode == 0
        assert shell.communicate(b"still here\n", timeout=10)[0] == b"still here\nend\n"
    finally:
        shell.kill()
        shell.wait()


def test_the_command_ends_when_its_client_is_killed(adb, device: Run, phone: EmulatedPhone) -> None:  # type: ignore[no-untyped-def]
    shell = adb.popen("-s", phone.serial, "shell", "exec sleep 98765")
    assert wait_for(lambda: is_running(device, "sleep 98765"))
    shell.kill()
    shell.wait()
    assert wait_for(lambda: not is_running(device, "sleep 98765"))


def test_interactive_shell_takes_lines_and_has_a_status(device: Run) -> None:
    result = device("shell", stdin=b"echo in=$((6*7))\nexit 5\n")
    assert b"in=42" in result.stdout
    assert result.returncode == 5


def test_ctrl_c_ends_the_command_of_a_terminal_and_not_its_shell(adb, device: Run, phone: EmulatedPhone) -> None:  # type: ignore[no-untyped-def]
    shell = adb.popen("-s", phone.serial, "shell", "-tt")
    assert shell.stdin is not None and shell.stdout is not None
    try:
        shell.stdin.write(b"sleep 54321\n")
        shell.stdin.flush()
        assert wait_for(lambda: is_running(device, "sleep 54321"))
        shell.stdin.write(b"\x03")
        shell.stdin.flush()
        assert wait_for(lambda: not is_running(device, "sleep 54321"))
        shell.stdin.write(b"echo still $((40+2))\nexit 3\n")
        shell.stdin.flush()
        output, _ = shell.communicate(timeout=10)
        assert b"still 42" in output
        assert shell.returncode == 3
    finally:
        shell.kill()
        shell.wait()


def test_an_unknown_service_is_refused_and_the_phone_goes_on(adb, device: Run, phone: EmulatedPhone) -> None:  # type: ignore[no-untyped-def]
    assert device("root").returncode != 0 or b"error" in device("root").stdout
    assert device("shell", "echo alive").stdout == b"alive\n"


def test_many_short_commands_leave_nothing_behind(device: Run, phone: EmulatedPhone) -> None:
    n_threads = threading.active_count()
    for i in range(20):
        assert device("shell", f"echo {i}").stdout == f"{i}\n".encode()
    assert wait_for(lambda: threading.active_count() <= n_threads + 1)
    states = device("shell", "for p in /proc/[0-9]*; do cat $p/stat; done").stdout.decode()
    assert " Z " not in states


def test_orphans_are_reaped(device: Run) -> None:
    """A background process whose parent has ended is the first process's child, which must wait for it."""
    device("shell", "(sleep 0.2 &) >/dev/null 2>&1 </dev/null")
    time.sleep(0.5)
    assert b" Z " not in device("shell", "for p in /proc/[0-9]*; do cat $p/stat; done").stdout


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/data/local/tmp/../../../../../../../../tmp/mkdeploy-escape", "Permission denied|Read-only"),
        ("/tmp/mkdeploy-escape", "Permission denied|Read-only"),
        ("/data/local/tmp/way-out/mkdeploy-escape", "Permission denied|Read-only|No such file"),
        ("/system/bin/sh", "Permission denied|Read-only"),
    ],
)
def test_push_cannot_leave_the_phone(device: Run, phone: EmulatedPhone, tmp_path: Path, path: str, why: str) -> None:
    link = phone.path(TMP) / "way-out"
    with contextlib.suppress(FileExistsError):
        link.symlink_to("/tmp")
    (tmp_path / "f").write_bytes(b"escaped")
    result = device("push", str(tmp_path / "f"), path)
    assert result.returncode != 0
    assert any(text.encode() in result.stdout + result.stderr for text in why.split("|"))
    assert not Path("/tmp/mkdeploy-escape").exists()


def test_pull_follows_links_inside_the_phone_only(device: Run, phone: EmulatedPhone, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    for name, target in {"absolute": str(secret), "relative": "../" * 20 + str(secret)}.items():
        link = phone.path(TMP) / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert device("pull", f"{TMP}/{name}", str(tmp_path / name)).returncode != 0
        assert not (tmp_path / name).exists() or (tmp_path / name).read_bytes() == b""
        assert device("shell", f"cat {TMP}/{name}").returncode != 0
