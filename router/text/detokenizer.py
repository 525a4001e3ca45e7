"""Token ids to text, one id at a time, at a cost that does not grow with what came before.

A `TokenTexts` is read once from tokenizer.json: what each id adds. A `Detokenizer` follows one
output. The pieces joined equal a one-shot decode of the prompt and all ids, less the prompt: a
leading space is kept, special tokens are left out, and U+FFFD stands only for bytes that are no
UTF-8 whatever comes next.

Two families are known. Byte-level tokenizers map each token to bytes. SentencePiece-like ones map
it to text, with `<0xE4>` tokens for single bytes: a run of those is text if the whole run is valid
UTF-8, else one U+FFFD per byte, so it is held until its end.
"""

import codecs
import re
from collections.abc import Collection, Mapping
from typing import Any

from common.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """What each id adds to the text. `special` ids add nothing."""

    def __init__(
        self, parts: Mapping[int, bytes], byte_ids: frozenset[int], special: frozenset[int]
    ):
        size = max(parts, default=-1) + 1
        self.parts = [parts.get(i, b"") for i in range(size)]
        self.byte_ids = byte_ids
        self.special = special
        self._visible = [b"" if i in special else part for i, part in enumerate(self.parts)]

    def showing(self, markers: Collection[str]) -> "TokenTexts":
        """The same, but these special tokens are seen."""
        shown = {marker.encode() for marker in markers}
        special = frozenset(i for i in self.special if self.raw(i) not in shown)
        return TokenTexts(dict(enumerate(self.parts)), self.byte_ids, special)

    def visible(self, token_id: int) -> bytes:
        """Bytes that `token_id` adds to an answer."""
        return self._visible[token_id] if token_id < len(self._visible) else b""

    def raw(self, token_id: int) -> bytes:
        """Bytes of the token itself, special or not."""
        return self.parts[token_id] if token_id < len(self.parts) else b""

    @property
    def max_bytes(self) -> int:
        return max(map(len, self.parts), default=1)

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int]) -> "TokenTexts":
        """From what tokenizer.json holds. Raises UnsupportedModel for an unknown decoder."""
        added = {t["id"]: t["content"] for t in tokenizer.get("added_tokens") or ()}
        special = frozenset(t["id"] for t in tokenizer.get("added_tokens") or () if t["special"])
        steps = _decoder_steps(tokenizer.get("decoder"))
        kinds = [step["type"] for step in steps]
        tokens = {i: text for text, i in vocabulary.items()} | added
        if kinds == ["ByteLevel"]:
            return cls({i: _byte_level(text) for i, text in tokens.items()}, frozenset(), special)
        if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            raise UnsupportedModel(
                f"tokenizer.json has decoder {' + '.join(kinds) or 'none'}; there are ByteLevel, "
                "Metaspace and Replace + ByteFallback + Fuse + Strip"
            )
        byte_ids = {}
        if "ByteFallback" in kinds:
            matches = {i: _BYTE_TOKEN.fullmatch(text) for i, text in tokens.items()}
            byte_ids = {i: bytes([int(m[1], 16)]) for i, m in matches.items() if m is not None}
        parts = {
            i: byte_ids.get(i) or _replaced(text, steps).encode() for i, text in tokens.items()
        }
        return cls(parts, frozenset(byte_ids), special)


class Detokenizer:
    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._run = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now."""
        texts = self._texts
        part = texts.visible(token_id)
        if not texts.byte_ids:
            return self._decoder.decode(part)
        if token_id in texts.byte_ids:
            self._run += part
            return ""
        if not part:
            return ""
        return self._end_of_run() + part.decode("utf-8", "replace")

    def flush(self) -> str:
        """What was waiting for more bytes that will not come."""
        return self._end_of_run() + self._decoder.decode(b"", final=True)

    def _end_of_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _replaced(text: str, steps: list[Mapping[str, Any]]) -> str:
    """Strip is left out: it concerns the first token of all, which belongs to the prompt."""
    for step in steps:
        if step["type"] == "Metaspace":
            text = text.replace(step.get("replacement", "\u2581"), " ")
        elif step["type"] == "Replace":
            pattern = step["pattern"]
            if "String" not in pattern:
                raise UnsupportedModel(
                    "tokenizer.json replaces by a regular expression when it decodes"
                )
            text = text.replace(pattern["String"], step["content"])
    return text


def _byte_alphabet() -> dict[int, int]:
    """From the characters that stand for bytes in byte-level vocabularies to those bytes.

    Other characters below 256 go to one that is no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = dict.fromkeys(others, 0xFFFF) | {byte: byte for byte in printable}
    return alphabet | {256 + n: byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
