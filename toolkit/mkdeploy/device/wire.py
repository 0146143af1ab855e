"""adb's messages: a header of six little-endian words, then a payload. Pure; both ends use it.

Job: bytes to messages and back, and the banner of a connection. Choice: a codec of our own in 150 lines, because
adb-shell's sums every payload byte in Python and knows only the protocol version that needs it; version 0x01000001
(`VERSION_SKIP_CHECKSUM`) lets both ends leave the sum out. Guarantees: a message that is malformed raises WireError and
nothing else; no length is trusted beyond `MAX_PAYLOAD`. What it does not do: sockets, streams.

Source: protocol.txt and adb.h of AOSP's packages/modules/adb.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

VERSION_MIN = 0x01000000
VERSION_SKIP_CHECKSUM = 0x01000001
MAX_PAYLOAD = 1 << 20
MAX_PAYLOAD_V1 = 4096  # before the peer has named its own
HEADER_BYTES = 24

_HEADER = struct.Struct("<6I")


def _command(name: bytes) -> int:
    return int.from_bytes(name, "little")


CNXN, AUTH, STLS = _command(b"CNXN"), _command(b"AUTH"), _command(b"STLS")
OPEN, OKAY, WRTE, CLSE = _command(b"OPEN"), _command(b"OKAY"), _command(b"WRTE"), _command(b"CLSE")
COMMANDS = {CNXN: "CNXN", AUTH: "AUTH", STLS: "STLS", OPEN: "OPEN", OKAY: "OKAY", WRTE: "WRTE", CLSE: "CLSE"}

AUTH_TOKEN, AUTH_SIGNATURE, AUTH_RSAPUBLICKEY = 1, 2, 3
TOKEN_BYTES = 20


class WireError(Exception):
    """The peer sent something that is not adb's protocol."""


@dataclass(frozen=True)
class Header:
    """A message without its payload."""

    command: int
    arg0: int
    arg1: int
    n_bytes: int
    checksum: int

    @property
    def name(self) -> str:
        """For messages to people."""
        return COMMANDS[self.command]


@dataclass(frozen=True)
class Message:
    """A whole message."""

    command: int
    arg0: int
    arg1: int
    payload: bytes | bytearray | memoryview = b""

    @property
    def name(self) -> str:
        """For messages to people."""
        return COMMANDS[self.command]


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """The sum of all bytes, modulo 2^32."""
    return sum(payload) & 0xFFFFFFFF


def pack_header(message: Message, *, with_checksum: bool) -> bytes:
    """The 24 bytes before the payload.

    Args:
        message: what is sent.
        with_checksum: the peer wants the sum (a version before 0x01000001, or not yet known).
    """
    total = checksum(message.payload) if with_checksum else 0
    command = message.command
    return _HEADER.pack(command, message.arg0, message.arg1, len(message.payload), total, command ^ 0xFFFFFFFF)


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Reads a header.

    Raises:
        WireError: unknown command, wrong magic or a payload beyond MAX_PAYLOAD.
    """
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes; expected {HEADER_BYTES}")
    command, arg0, arg1, n_bytes, total, magic = _HEADER.unpack(data)
    if command not in COMMANDS or magic != command ^ 0xFFFFFFFF:
        raise WireError(f"{bytes(data[:8])!r} is no adb message")
    if n_bytes > MAX_PAYLOAD:
        raise WireError(f"{COMMANDS[command]} with {n_bytes} bytes; expected at most {MAX_PAYLOAD}")
    return Header(command, arg0, arg1, n_bytes, total)


def read_message(read: Callable[[int], bytes | bytearray | memoryview], *, check: bool) -> Message:
    """Reads one message.

    Args:
        read: returns exactly so many bytes, or raises.
        check: compare the checksum.

    Raises:
        WireError: malformed, or the checksum differs.
    """
    header = unpack_header(read(HEADER_BYTES))
    payload: bytes | bytearray | memoryview = read(header.n_bytes) if header.n_bytes else b""
    if check and checksum(payload) != header.checksum:
        raise WireError(f"{header.name}: its checksum is {header.checksum}, that of its payload {checksum(payload)}")
    return Message(header.command, header.arg0, header.arg1, payload)


@dataclass(frozen=True)
class Banner:
    """Who is at the other end: `state` is "device", "host", "recovery", …"""

    state: str
    properties: Mapping[str, str]
    features: frozenset[str]


def pack_banner(state: str, properties: Mapping[str, str], features: Iterable[str]) -> bytes:
    """CNXN's payload: `device::ro.product.name=x;…;features=a,b`."""
    parts = [f"{key}={value}" for key, value in properties.items()] + [f"features={','.join(features)}"]
    return f"{state}::{';'.join(parts)}".encode()


def unpack_banner(payload: bytes | bytearray | memoryview) -> Banner:
    """Reads CNXN's payload; what it does not understand it leaves out."""
    state, _, rest = bytes(payload).rstrip(b"\0").decode("utf-8", "replace").partition(":")
    pairs = dict(part.split("=", 1) for part in rest.rpartition(":")[2].split(";") if "=" in part)
    features = frozenset(name for name in pairs.pop("features", "").split(",") if name)
    return Banner(state, pairs, features)
