"""What a phone is and how it is: one shell call each, read by parse.py.

Job: `PhoneInfo` (what does not change) and `snapshot` (temperatures, frequencies, memory, battery: what does).
Choice: one command per answer, because a round trip costs more than all of its reads. Guarantees: no serial number in
anything that is kept. What it does not do: judge (doctor.py).
"""

from dataclasses import dataclass
from typing import Any

from mkdeploy.device import parse
from mkdeploy.device.adb import Device

WORK_ROOT = "/data/local/tmp/mkdeploy"
_MARKER = "==mkdeploy=="

_ZONES = (
    'for z in /sys/class/thermal/thermal_zone*; do [ -r "$z/temp" ] &&'
    ' echo "$(cat "$z/type" 2>/dev/null) $(cat "$z/temp" 2>/dev/null)"; done'
)
_CORES = (
    "for c in /sys/devices/system/cpu/cpu[0-9]*; do f=$c/cpufreq; [ -d $f ] || continue;"
    " g=$(cat $f/scaling_governor 2>/dev/null); k=$(cat $f/scaling_cur_freq 2>/dev/null);"
    " m=$(cat $f/cpuinfo_max_freq 2>/dev/null); echo ${c##*cpu} ${g:--} ${k:--} ${m:--}; done"
)
_BATTERY = (
    "for n in capacity status current_now voltage_now; do"
    " v=$(cat /sys/class/power_supply/battery/$n 2>/dev/null) && echo $n $v; done"
)
_STATE = {"meminfo": "cat /proc/meminfo", "zones": _ZONES, "cores": _CORES, "battery": _BATTERY}
_IDENTITY = {
    "properties": "getprop",
    "cpuinfo": "cat /proc/cpuinfo",
    "kernel": "uname -r",
    "space": "df -k /data/local/tmp 2>/dev/null || df /data/local/tmp",
}


def _ask(device: Device, commands: dict[str, str]) -> dict[str, str]:
    text = "; ".join(f"echo; echo '{_MARKER} {name}'; {command}" for name, command in commands.items())
    sections = parse.split_sections(device.shell(text).text, _MARKER)
    return {name: sections.get(name, "") for name in commands}


@dataclass(frozen=True)
class PhoneState:
    """A moment."""

    zones: tuple[parse.Zone, ...]
    cores: tuple[parse.Core, ...]
    battery: parse.Battery
    mem_total_bytes: int | None
    mem_available_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for records."""
        return {
            "hottest_c": parse.hottest_c(self.zones),
            "zones_c": {zone.type: zone.celsius for zone in self.zones},
            "cpu_khz": [core.cur_khz for core in self.cores],
            "mem_available_bytes": self.mem_available_bytes,
            "battery_percent": self.battery.capacity,
            "battery_w": self.battery.power_w,
            "battery_status": self.battery.status,
        }


@dataclass(frozen=True)
class PhoneInfo:
    """What does not change while it is attached.

    Attributes:
        emulated: "", or "qemu" or "native" for an emulated phone.
        hexagon: version of the HTP where a property names it; empty: not known.
    """

    manufacturer: str
    model: str
    soc: str
    platform: str
    android_version: str
    sdk: str
    kernel: str
    abi: str
    cpu_name: str
    features: frozenset[str]
    emulated: str
    hexagon: str
    space: parse.Space | None

    @property
    def name(self) -> str:
        """Maker and model, for people and file names."""
        return f"{self.manufacturer} {self.model}".strip() or "unknown phone"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for records: no serial."""
        return {
            "manufacturer": self.manufacturer,
            "model": self.model,
            "soc": self.soc,
            "platform": self.platform,
            "android_version": self.android_version,
            "kernel": self.kernel,
            "abi": self.abi,
            "cpu_name": self.cpu_name,
            "emulated": self.emulated,
            "hexagon": self.hexagon,
        }


# HTP by platform (ggml-hexagon supports v73 and later). Source: Qualcomm's product briefs.
_HEXAGON = {"kalama": "v73", "pineapple": "v75", "sun": "v79", "canoe": "v81"}


def read_info(device: Device) -> PhoneInfo:
    """Asks the phone who it is.

    Raises:
        NoPhoneError: it is gone.
        MkdeployError: its shell does not work.
    """
    text = _ask(device, _IDENTITY)
    props = parse.properties(text["properties"])

    def first(*keys: str) -> str:
        return next((props[key] for key in keys if props.get(key)), "")

    platform = first("ro.board.platform")
    return PhoneInfo(
        manufacturer=first("ro.product.manufacturer", "ro.product.brand"),
        model=first("ro.product.model"),
        soc=first("ro.soc.model", "ro.hardware.chipname", "ro.board.platform"),
        platform=platform,
        android_version=first("ro.build.version.release"),
        sdk=first("ro.build.version.sdk"),
        kernel=text["kernel"].strip(),
        abi=first("ro.product.cpu.abi"),
        cpu_name=parse.cpu_name(text["cpuinfo"]),
        features=parse.cpu_features(text["cpuinfo"]),
        emulated=first("ro.mkdeploy.emulated"),
        hexagon=first("ro.mkdeploy.hexagon") or _HEXAGON.get(platform, ""),
        space=parse.space(text["space"]),
    )


def read_state(device: Device) -> PhoneState:
    """Asks the phone how it is. Raises as read_info."""
    text = _ask(device, _STATE)
    memory = parse.meminfo(text["meminfo"])
    return PhoneState(
        zones=parse.zones(text["zones"]),
        cores=parse.cores(text["cores"]),
        battery=parse.battery(text["battery"]),
        mem_total_bytes=memory.get("MemTotal"),
        mem_available_bytes=memory.get("MemAvailable"),
    )
