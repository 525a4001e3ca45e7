"""Wire messages on a stream socket between processes of one machine: each behind its length."""

from typing import Final

from common.errors import MalformedMessage
from common.limits import MAX_MESSAGE_BYTES
from common.wire import decode, encode

LENGTH_BYTES: Final = 4


def framed(message: object) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class Frames:
    """What arrives, piece by piece, as messages."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[object]:
        """The messages that are complete now. Raises MalformedMessage."""
        self._buffer += data
        found: list[object] = []
        while (frame := self._next()) is not None:
            found.append(decode(frame))
        return found

    def _next(self) -> bytes | None:
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if length > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        frame, self._buffer = self._buffer[LENGTH_BYTES:end], self._buffer[end:]
        return frame
