"""What a program on the emulated phone sees: its files, properties and sensors.

Job: fill the phone's root folder from a profile. Choice: Android's own userland, toybox and mksh, so that the commands
that mkdeploy sends to phones are answered by the programs that phones have. Guarantees: real files, so O_DIRECT works
under /data. What it does not do: run anything (world.py).
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mkdeploy.errors import NoPhoneError
from mkdeploy.profiles import Profile

KERNEL_FILES = ("cpuinfo", "meminfo")  # shown in place of the host's in /proc
HIDDEN = ".phone"
DIRS = ("data/local/tmp", "sdcard", "system/bin", "proc", "dev", "sys", "tmp", "usr/lib", "usr/lib64", HIDDEN)
PROGRAMS = {"toybox": "toybox", "mksh": "mksh"}  # program: Debian's package
AVAILABLE_SHARE = 0.55  # of all RAM, with Android running: invented, as the profile's README says
VISIBLE_SHARE = 0.945  # MemTotal of the RAM as sold: the kernel and the modem keep the rest; invented, likewise

GETPROP = """#!/system/bin/sh
if [ $# = 0 ]; then
  while IFS='=' read -r key value; do echo "[$key]: [$value]"; done </system/build.prop
else
  while IFS='=' read -r key value; do [ "$key" = "$1" ] && { echo "$value"; exit 0; }; done </system/build.prop
  echo "$2"
fi
"""
# A full phone is a fault on demand; otherwise the numbers are those of the folder's own file system.
DF = f"""#!/system/bin/sh
[ -f /{HIDDEN}/full ] || exec toybox df "$@"
echo "Filesystem     1K-blocks     Used Available Use% Mounted on"
echo "/dev/block/dm-1 100000000 99999000      1000 100% /data"
"""
# Android links toybox with BoringSSL, whose SHA-256 uses the processor's instructions; Debian's has plain C, a tenth
# as fast. openssl stands in for it, in toybox's format.
SHA256SUM = """#!/system/bin/sh
set -o pipefail
case "$1" in -* | "") exec toybox sha256sum "$@" ;; esac
/system/bin/openssl dgst -sha256 -r "$@" | sed 's/^\\([0-9a-f]*\\) [*]/\\1  /'
"""

# The first process: waits for orphans as they end, and ends itself with its input, the emulator's pipe.
INIT = """#!/system/bin/sh
trap : CHLD
while read -r line; do :; done
"""


def build(root: Path, profile: Profile, *, native: bool) -> None:
    """Fills the root folder; what is in /data and /sdcard stays.

    Args:
        root: an existing folder.
        profile: the phone.
        native: its programs are this machine's own.

    Raises:
        NoPhoneError: a program of Android's userland is missing here.
    """
    for name in DIRS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for link, target in {"lib": "usr/lib", "lib64": "usr/lib64", "bin": "system/bin"}.items():
        if not (root / link).is_symlink():
            (root / link).symlink_to(target)
    _programs(root / "system" / "bin")
    properties = _properties(profile, native=native)
    (root / "system" / "build.prop").write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    hidden = root / HIDDEN
    (hidden / "meminfo").write_text(meminfo(profile.ram_bytes))
    (hidden / "cpuinfo").write_text(Path("/proc/cpuinfo").read_text() if native else cpuinfo(profile))
    (hidden / "full").unlink(missing_ok=True)
    (hidden / "init").write_text(INIT)
    (hidden / "init").chmod(0o755)
    _sensors(root / "sys", profile)
    for name in ("null", "zero", "random", "urandom", "tty"):
        (root / "dev" / name).touch()


def _programs(folder: Path) -> None:
    for name, package in PROGRAMS.items():
        found = shutil.which(name)
        if found is None:
            raise NoPhoneError(f"the emulated phone needs {name}, Android's own userland: apt-get install {package}")
        shutil.copy2(found, folder / name)
    listing = subprocess.run([str(folder / "toybox"), "--long"], capture_output=True, text=True, timeout=10)
    for path in listing.stdout.split():
        link = folder / Path(path).name
        if not link.exists() and not link.is_symlink():
            link.symlink_to("toybox")
    scripts = {"getprop": GETPROP, "df": DF}
    openssl = shutil.which("openssl")
    if openssl is not None:
        shutil.copy2(openssl, folder / "openssl")
        scripts["sha256sum"] = SHA256SUM
    for name, text in scripts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    if not (folder / "sh").is_symlink():
        (folder / "sh").unlink(missing_ok=True)
        (folder / "sh").symlink_to("mksh")


def _properties(profile: Profile, *, native: bool) -> Mapping[str, str]:
    phone = profile.phone
    abi = "x86_64" if native else "arm64-v8a"
    return {
        "ro.product.manufacturer": phone.manufacturer,
        "ro.product.model": phone.model,
        "ro.product.device": phone.device,
        "ro.product.name": phone.device,
        "ro.product.cpu.abi": abi,
        "ro.product.cpu.abilist": abi,
        "ro.build.version.release": phone.android_version,
        "ro.build.version.sdk": str(phone.sdk),
        "ro.board.platform": phone.platform,
        "ro.soc.model": profile.soc,
        "ro.hardware": "qcom" if phone.hexagon else "generic",
        "ro.mkdeploy.emulated": "native" if native else "qemu",
        "ro.mkdeploy.hexagon": phone.hexagon,
    }


def banner_properties(profile: Profile) -> Mapping[str, str]:
    """What adbd's banner says of the phone."""
    phone = profile.phone
    return {
        "ro.product.name": phone.device,
        "ro.product.model": phone.model.replace(" ", "_"),
        "ro.product.device": phone.device,
    }


def meminfo(ram_bytes: int) -> str:
    """/proc/meminfo's lines that mkdeploy and its users look at."""
    total = int(ram_bytes * VISIBLE_SHARE) // 1024
    available = int(ram_bytes * AVAILABLE_SHARE) // 1024
    rows = {"MemTotal": total, "MemFree": available // 3, "MemAvailable": available, "Buffers": 8192}
    rows |= {"Cached": available // 2, "SwapTotal": 0, "SwapFree": 0}
    return "".join(f"{name + ':':<16}{kib:>8} kB\n" for name, kib in rows.items())


def cpuinfo(profile: Profile) -> str:
    """/proc/cpuinfo of an arm64 kernel."""
    blocks = []
    features = " ".join(profile.phone.features)
    parts = [core.part for core in profile.phone.cores for _ in range(core.count)]
    for i, part in enumerate(parts):
        blocks.append(
            f"processor\t: {i}\nBogoMIPS\t: 38.40\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
            f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 0\n"
        )
    return "\n".join(blocks) + "\n"


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def _sensors(sys: Path, profile: Profile) -> None:
    thermal = sys / "class" / "thermal"
    if thermal.exists():
        shutil.rmtree(thermal)
    for i, zone in enumerate(profile.phone.thermal):
        _write(thermal / f"thermal_zone{i}" / "type", zone.type)
        _write(thermal / f"thermal_zone{i}" / "temp", round(zone.idle_c * 1000))
    i_core = 0
    for core in profile.phone.cores:
        for _ in range(core.count):
            cpufreq = sys / "devices" / "system" / "cpu" / f"cpu{i_core}" / "cpufreq"
            _write(cpufreq / "scaling_governor", "walt" if profile.phone.hexagon else "schedutil")
            for name in ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq"):
                _write(cpufreq / name, core.max_mhz * 1000)
            i_core += 1
    battery = sys / "class" / "power_supply" / "battery"
    for name, value in {"capacity": 80, "status": "Discharging", "temp": 300}.items():
        _write(battery / name, value)
    _write(battery / "voltage_now", 3900000)
    _write(battery / "current_now", -250000)


def set_temperature(root: Path, celsius: float) -> None:
    """Every thermal zone shows this."""
    for path in (root / "sys" / "class" / "thermal").glob("thermal_zone*/temp"):
        path.write_text(f"{round(celsius * 1000)}\n")


def set_full(root: Path, full: bool) -> None:
    """`df` shows a full phone, or the truth."""
    marker = root / HIDDEN / "full"
    if full:
        marker.touch()
    else:
        marker.unlink(missing_ok=True)


def resolve(base: str, path: str, *, follow_last: bool = True) -> str:
    """A path of the phone as a path of this machine; links are followed inside the phone only.

    Args:
        base: the phone's root, as this machine sees it.
        path: absolute or relative to "/".
        follow_last: follow a link at the end, too.
    """
    todo = [part for part in path.split("/") if part not in ("", ".")]
    done: list[str] = []
    n_links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        here = "/".join([base, *done, part])
        if (todo or follow_last) and os.path.islink(here):
            n_links += 1
            if n_links > 40:
                raise OSError(40, "Too many levels of symbolic links", path)
            target = os.readlink(here)
            if target.startswith("/"):
                done = []
            todo = [piece for piece in target.split("/") if piece not in ("", ".")] + todo
            continue
        done.append(part)
    return "/".join([base, *done])
