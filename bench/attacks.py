"""What `bench router --hostile` sends: the kinds of public and private reports, as bytes that are
made before anything is measured.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc

VOCAB_SIZE = 49152
NUM_BIASED_PROMPTS = 40
NUM_FORMED_PROMPTS = 60
GRAMMAR_CHARS = 250_000
OUTPUT_TOKENS = 8
MAX_WORDS = 9_000


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    host: str
    port: int
    worker: str
    """A worker's internal address."""
    model: str

    @staticmethod
    def of(url: str, worker: str, model: str) -> "Target":
        parts = urlsplit(url)
        return Target(url, parts.hostname or "", parts.port or 80, worker, model)


@dataclass(frozen=True, slots=True)
class Attack:
    """Bytes to the router's port, or a message to a worker's."""

    data: bytes
    is_message: bool = False


def ask(target: Target, attack: Attack) -> str:
    """The status of the answer."""
    return _tell(target, attack.data) if attack.is_message else _send(target, attack.data)


def _send(target: Target, data: bytes) -> str:
    with socket.create_connection((target.host, target.port), timeout=300) as connection:
        with contextlib.suppress(OSError):  # refused before it was all sent: the answer says why
            connection.sendall(data)
        try:
            found = connection.recv(65536)
        except OSError:
            return "closed"
    return found.split(b" ", 2)[1].decode() if found else "closed"


def _tell(target: Target, data: bytes) -> str:
    with grpc.insecure_channel(target.worker) as channel:
        call = channel.stream_stream("/tandem.Worker/Watch")(iter([data]), timeout=60)
        try:
            next(iter(call))
        except grpc.RpcError as error:
            return str(error.code().name)
        call.cancel()
    return "OK"


def _post(path: str, body: Any) -> Attack:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return Attack(head.encode() + data)


def _prompts(count: int, number: int, **fields: Any) -> Attack:
    prompts = [[300 + number, 400 + index] for index in range(count)]
    return _post(
        "/v1/completions",
        {"prompt": prompts, "max_tokens": OUTPUT_TOKENS, "temperature": 0, **fields},
    )


def _schemas(number: int) -> list[Attack]:
    """Each is new, since outcomes are remembered."""
    integers = {"type": "array", "items": {"type": "integer"}, "title": str(number)}
    many = json.dumps(integers | {"maxItems": 1_000_000 + number})
    forms: list[dict[str, Any]] = [
        {"guided_json": integers | {"maxItems": 100_000_000}},
        {"guided_grammar": f"start: %json {many}"},
        {"guided_grammar": f'start: x{number}\nx{number}: "a" | %json {many}'},
        {"guided_json": {"anyOf": [integers | {"maxItems": 9_999}] * 10}},
        {"guided_json": {"properties": {f"p{i}-{number}": {} for i in range(500)}}},
        {"guided_regex": "(" * 50_000 + str(number)},
    ]
    return [_prompts(1, number, **form) for form in forms]


def _biased(number: int) -> list[Attack]:
    bias = {str(i): (i + number) % 3 for i in range(VOCAB_SIZE)}
    return [_prompts(NUM_BIASED_PROMPTS, number, logit_bias=bias, ignore_eos=True)]


def _formed(number: int) -> list[Attack]:
    words = "".join(f"w{number}a{i:05} " for i in range(GRAMMAR_CHARS // 20))
    choices = " | ".join(f'"{word}"' for word in words.split()[:MAX_WORDS])
    return [
        _prompts(NUM_FORMED_PROMPTS, number, guided_grammar=f"start: ({choices})+"[:GRAMMAR_CHARS])
    ]


def _ordinary(count: int) -> Callable[[int], list[Attack]]:
    return lambda number: [_prompts(count, number, ignore_eos=True)]


def _heads(number: int) -> list[Attack]:
    start = b"GET /health HTTP/1.1\r\nhost: a\r\n"
    return [
        Attack(start + b"x: " + b"a" * 60_000_000 + b"\r\n\r\n"),
        Attack(start + b"".join(b"x%d: 1\r\n" % i for i in range(1_000_000)) + b"\r\n"),
    ]


def _messages(number: int) -> list[Attack]:
    count = 16_000_000
    empty = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    return [Attack(b"\x82\xa1t\xa5Watch\xa4more" + empty, is_message=True)] * 2


def _bodies(number: int) -> list[Attack]:
    ids = b"1234," * 1_200_000 + b"%d" % number
    lists = b"[]," * 190_000 + b"[]"
    words = b'"%s"' % (b"word " * 1_600_000)
    escapes = b'"%s"' % (b"\\ud83d\\ude00" * 600_000)
    return [
        _post("/v1/completions", b'{"max_tokens":1,"prompt":%s}' % value)
        for value in (b"[%s]" % ids, b"[%s]" % lists, words, escapes)
    ]


def _nothing(number: int) -> list[Attack]:
    return []


Calls = Callable[[int], Sequence[Attack]]
KINDS: dict[str, tuple[Calls, Calls]] = {
    "T01 schemas": (_schemas, _nothing),
    "T02 a bias of 49,152 x 40 prompts": (_biased, _ordinary(NUM_BIASED_PROMPTS)),
    "T02 a grammar of 250 KB x 60 prompts": (_formed, _ordinary(NUM_FORMED_PROMPTS)),
    "T03 heads of 60 MB": (_heads, _nothing),
    "T04 a message of 16 million lists": (_messages, _nothing),
    "T05 bodies of 8 MB": (_bodies, _nothing),
}
"""The attack, and what it is compared with; both by the number of the run."""
