"""The commands that concern phones: devices, doctor, push, emulate.

Job: the same as cli.py's, whose app they join: arguments into one call, nothing else.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from mkdeploy.cli_options import DebugOption, JsonOption, print_json, print_rich
from mkdeploy.errors import NoPhoneError
from mkdeploy.sizes import format_size

Serial = Annotated[
    str | None,
    typer.Option("--serial", metavar="SERIAL|HOST:PORT", help="The phone; default ANDROID_SERIAL, or the only one."),
]


def devices(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List phones: those of the running adb server; without a server, those at USB."""
    from mkdeploy.device.adb import attached

    phones = attached()
    if as_json:
        print_json([dataclasses.asdict(phone) for phone in phones])
        return
    if not phones:
        print(
            "no phone is attached; --serial HOST:PORT reaches one by network, `mkdeploy emulate` makes one",
            file=sys.stderr,
        )
    for phone in phones:
        print("\t".join((phone.serial, phone.state, phone.model or "-", phone.via)))


def doctor(
    serial: Serial = None,
    flash: Annotated[bool, typer.Option("--flash/--no-flash", help="Measure the flash, too.")] = True,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> int:
    """Look at this computer and the phone: what is there, what is wrong, and what to do about it.

    Exit code 3 if something is wrong.
    """
    from mkdeploy.device import doctor as doctor_module
    from mkdeploy.iobench import render

    diagnosis = doctor_module.doctor(serial, flash=flash)
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        print_rich(diagnosis.render())
        if diagnosis.curve:
            print_rich(render(diagnosis.curve))
    return 0 if diagnosis.is_healthy else NoPhoneError.exit_code


def push(
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A package.")],
    serial: Serial = None,
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="Folder on the phone that gets the package.")
    ] = "/data/local/tmp/mkdeploy/packages",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what is not of this package from its folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even to /sdcard, and without enough free space.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Send a package and the engine to a phone: only what differs, checked there, resumable."""
    from mkdeploy.device import push as push_module
    from mkdeploy.device.adb import connect
    from mkdeploy.device.binary import find_binary
    from mkdeploy.device.phone import read_info
    from mkdeploy.errors import MkdeployError
    from mkdeploy.progress import RichProgress

    push_module.check_target(to, force=force)
    push_module.package_files(package)  # a package that is none is known before a phone is looked for
    with connect(serial) as device, RichProgress() as progress:
        info = read_info(device)
        print(f"{info.name} by {device.via}", file=sys.stderr)
        binary = None
        try:
            binary = find_binary(info)
        except MkdeployError as error:
            progress.warn(f"{error}; only the package is sent")
        result = push_module.push(
            package, device, binary=binary, to=to, dry_run=dry_run, prune=prune, force=force, progress=progress
        )
    if as_json:
        print_json(result.to_dict())
        return
    verb = "would send" if dry_run else "sent"
    removed = f", {'would remove' if dry_run else 'removed'} {', '.join(result.removed)}" if result.removed else ""
    print(
        f"{result.path}: {verb} {format_size(result.sent_bytes)}, {format_size(result.skipped_bytes)} already there"
        f"{removed}"
    )


def emulate(
    port: Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="On 127.0.0.1; 0: any.")] = 0,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="Keep the phone's files here; default: scratch.")
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="Phone to imitate, or a profile's path.")
    ] = "ufs40-16gb-8elite",
    native: Annotated[
        bool, typer.Option("--native", help="Run this machine's own build, not aarch64 programs.")
    ] = False,
    throttle: Annotated[bool, typer.Option("--throttle/--no-throttle", help="Slow reads to the phone's flash.")] = True,
    require_auth: Annotated[bool, typer.Option("--auth", help="Ask for adb's key, as phones do.")] = False,
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME[=VALUE]", help="disconnect, slow-link, no-space, full, corrupt, kill, …"),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, help="End when unused for so long.")
    ] = 3600.0,
    debug: DebugOption = False,
) -> None:
    """Emulate a phone on loopback, for tests without one: adb's protocol, Android's userland, a profile's hardware.

    Prints its serial, then serves until Ctrl-C. Timings on it say nothing about a real phone.
    """
    from mkdeploy.emulator.phone import emulate as serve

    serve(
        port=port,
        root=root,
        profile=profile,
        native=native,
        throttle=throttle,
        require_auth=require_auth,
        faults=faults or (),
        idle_timeout_s=timeout,
    )


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    app.command()(devices)
    app.command()(doctor)
    app.command()(push)
    app.command()(emulate)
