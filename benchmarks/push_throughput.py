#!/usr/bin/env python3
"""How fast `mkdeploy push` is beside `adb push` of the same tree, over loopback to an emulated phone, in one run.

Both send a package to the same emulated phone, taking turns (ABBA), each time to an empty folder; ours also compares
hashes there before and after and renames. Reports bytes/s of each and the median of the pairs' ratios. Emulated: says
nothing about USB.

    benchmarks/push_throughput.py [--layers 2] [-r 5] [--json]
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mkdeploy.convert.pipeline import convert
from mkdeploy.device.adb import connect
from mkdeploy.device.push import push
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.sizes import format_size

ROOT = Path(__file__).resolve().parents[1]

TARGET_RATIO = 0.5
PHONE_DIR = "/data/local/tmp/bench"


def make_package(folder: Path, layers: int) -> Path:
    """A package of random weights, about 0.33 GB a layer, in shards of 128 MiB."""
    from models.random_moe import Geometry, build_random_moe

    source = build_random_moe(folder / "random.gguf", Geometry(layers=layers))
    convert(source, folder / "random.mkd", keep_types=True, shard_bytes=128 << 20)
    source.unlink()
    return folder / "random.mkd"


def measure(package: Path, reps: int, scratch: Path) -> dict[str, Any]:
    """Pushes in turn, ABBA; the first pair warms up and is not counted."""
    from tests.emulation.phones import Adb

    n_bytes = sum(path.stat().st_size for path in package.iterdir())
    ours, theirs = [], []
    with EmulatedPhone(native=True) as phone:
        adb = Adb(scratch)
        os.environ["ANDROID_ADB_SERVER_PORT"] = str(adb.port)
        adb.ok("start-server")

        def by_us() -> float:
            with connect(phone.serial) as device:
                began = time.monotonic()
                result = push(package, device, to=PHONE_DIR)
                took = time.monotonic() - began
            assert result.sent_bytes == n_bytes
            return n_bytes / took

        def by_adb() -> float:
            adb.ok("connect", phone.serial)
            adb.ok("shell", f"mkdir -p {PHONE_DIR}")
            began = time.monotonic()
            adb.ok("push", str(package), PHONE_DIR)
            took = time.monotonic() - began
            adb.ok("disconnect", phone.serial)
            return n_bytes / took

        try:
            for rep in range(reps + 1):
                rates = {}
                for name, run in (("ours", by_us), ("adb", by_adb))[:: 1 if rep % 2 else -1]:
                    shutil.rmtree(phone.path(PHONE_DIR), ignore_errors=True)
                    rates[name] = run()
                if rep:
                    ours.append(rates["ours"])
                    theirs.append(rates["adb"])
        finally:
            adb("kill-server")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "n_bytes": n_bytes,
        "repetitions": reps,
        "emulated": True,
        "mkdeploy_bytes_per_s": statistics.median(ours),
        "adb_bytes_per_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="about 0.33 GB each")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # models/ and tests/ are not installed
    with tempfile.TemporaryDirectory(prefix="push-throughput-") as scratch:
        package = make_package(Path(scratch), arguments.layers)
        result = measure(package, arguments.repetitions, Path(scratch))
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{format_size(result['n_bytes'])} over loopback, medians of {arguments.repetitions}, emulated phone:")
        print(f"  mkdeploy push  {result['mkdeploy_bytes_per_s'] / 1e6:8.0f} MB/s  (compares and renames, too)")
        print(f"  adb push       {result['adb_bytes_per_s'] / 1e6:8.0f} MB/s")
        print(f"  ratio          {result['ratio']:8.2f}       (target {TARGET_RATIO})")
    return 0 if result["ratio"] >= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
