"""`mkdeploy bench --serial`: the desktop's bench on a phone, looked at around every repetition.

Job: open the phone, measure there with a pacer, keep everything in a run file. What it does not do: measure
(bench/measure.py) or wait (bench/pacing.py).
"""

import contextlib
from datetime import datetime
from pathlib import Path

from mkdeploy.bench.measure import bench
from mkdeploy.bench.options import BenchOptions, combinations
from mkdeploy.bench.pacing import DEFAULT_TIMEOUT_S, CoolingPacer
from mkdeploy.bench.record import Record
from mkdeploy.bench.run_file import FOLDER, RunFile, run_file_name
from mkdeploy.device.adb import say_on_stderr
from mkdeploy.device.phone import read_state
from mkdeploy.device.place import open_phone
from mkdeploy.errors import MkdeployError


def bench_on_phone(
    package: Path,
    options: BenchOptions,
    serial: str | None,
    *,
    output: str = "md",
    output_err: str | None = None,
    cool_to_c: float | None = None,
    cool_timeout_s: float = DEFAULT_TIMEOUT_S,
    save: Path | None = None,
) -> list[Record]:
    """Measures on a phone and prints as on the desktop.

    Args:
        package, options, output, output_err: as bench.measure.bench.
        serial: the phone's; None: the only one.
        cool_to_c, cool_timeout_s: before each repetition.
        save: the run file; None: runs/DATE-DEVICE.json.

    Raises:
        NoPhoneError: no phone, or it was lost; the run file then says what is missing.
        MkdeployError: as `bench`.
    """

    started = datetime.now().astimezone()
    with open_phone(serial) as place:
        n_rows = len(combinations(options)) * len(options.tests)
        pacer = CoolingPacer(
            lambda: read_state(place.device).to_dict(), cool_to_c=cool_to_c, timeout_s=cool_timeout_s, say=say_on_stderr
        )
        path = save or FOLDER / run_file_name(started, place.phone_model)
        run = RunFile(path, place.info.to_dict(), started, n_rows)
        try:
            rows = bench(
                package, options, output=output, output_err=output_err, place=place, pacer=pacer, on_record=run.add
            )
        except BaseException as error:
            with contextlib.suppress(MkdeployError):
                run.write("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
                say_on_stderr(f"what was measured is in {path}")
            raise
        run.write()
        say_on_stderr(f"the record is in {path}")
        return rows
