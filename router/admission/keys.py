"""API keys: who may ask, for how much at once, and how urgently.

Keys come from a file, from the environment, or both; without any, everybody may ask. A line of the
file is `KEY [name=NAME] [max_outputs=N] [priorities=LOW:HIGH]`; `#` begins a comment at the start
of a line or after a space. The file is read again when it has changed, which is looked at with each
request; a file that has become unreadable changes nothing. Keys are compared by their hashes in
constant time, all of them, whichever fits.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized
from common.request_checks import MAX_PRIORITY

log = logging.getLogger(__name__)

_COMMENT = re.compile(r"(^|\s)#.*")
_PRIORITIES = re.compile(r"(-?\d{1,10}):(-?\d{1,10})")

_RETRY_AFTER_S = 1.0
DEFAULT_PRIORITIES = range(101)
"""What a client may ask for where nothing says otherwise: to be served later than others, never
sooner.
"""


@dataclass(slots=True, eq=False)
class Key:
    """`num_outputs` of this key wait or run. `priorities`: those it may ask for, if not the
    server's usual ones.
    """

    digest: bytes
    name: str | None = None
    max_outputs: int | None = None
    priorities: range | None = None
    num_outputs: int = 0

    @property
    def client(self) -> str:
        """Who workers think asks: keys of one name are one client. They need not know the name."""
        known = self.digest if self.name is None else self.name.encode()
        return hashlib.blake2b(known, digest_size=6).hexdigest()

    def salted(self, salt: str) -> str:
        """A salt that no other client's requests have."""
        return hashlib.blake2b(f"{self.client}/{salt}".encode(), digest_size=16).hexdigest()

    def take(self, num_outputs: int) -> None:
        """Raises InvalidRequest for what can never be, Overloaded for what cannot be now."""
        limit = self.max_outputs
        if limit is not None and num_outputs > limit:
            raise InvalidRequest(
                f"the request asks for {num_outputs} outputs; this API key may have {limit} at a"
                " time",
                param="n",
            )
        if limit is not None and self.num_outputs + num_outputs > limit:
            raise Overloaded(
                f"this API key has {self.num_outputs} outputs under way; its limit is {limit}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_outputs += num_outputs

    def give_back(self, num_outputs: int) -> None:
        self.num_outputs -= num_outputs
        assert self.num_outputs >= 0


class KeyRing:
    def __init__(self, keys: Iterable[Key], path: Path | None = None, from_elsewhere: int = 0):
        """`path` is where all keys but the first `from_elsewhere` come from."""
        self._keys = list(keys)
        self._path = path
        self._num_fixed = from_elsewhere
        self._state = _state(path)

    @staticmethod
    def open(path: Path | None, environment: str) -> "KeyRing":
        """Raises ConfigError. `environment` holds keys separated by commas."""
        given = [_key(text.strip(), "environment") for text in environment.split(",")]
        fixed = [key for key in given if key is not None]
        from_file = [] if path is None else read_keys(path)
        if path is not None and not from_file and not fixed:
            raise ConfigError(f"--api-keys {path}: there is no key in it")
        return KeyRing([*fixed, *from_file], path, len(fixed))

    @property
    def is_open(self) -> bool:
        """Everybody may ask."""
        return not self._keys and self._path is None

    def check(self, headers: Mapping[str, str]) -> Key | None:
        """The key of a request; None when none is needed. Raises Unauthorized."""
        self._reload()
        if self.is_open:
            return None
        found = self._find(_given(headers))
        if found is None:
            raise Unauthorized("a valid API key is required")
        return found

    def _find(self, given: str) -> Key | None:
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _reload(self) -> None:
        state = _state(self._path)
        if self._path is None or state == self._state:
            return
        self._state = state
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            log.error("API keys stay as they were: %s", error)
            return
        # requests under way give back to the object they took from, so it stays
        known = {key.digest: key for key in self._keys[self._num_fixed :]}
        for key in keys:
            kept = known.setdefault(key.digest, key)
            kept.name, kept.max_outputs, kept.priorities = key.name, key.max_outputs, key.priorities
        self._keys[self._num_fixed :] = [known[key.digest] for key in keys]
        log.info("%d API keys read from %s", len(keys), self._path)


def read_keys(path: Path) -> list[Key]:
    """Raises ConfigError, which names the line but not the key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys {path}: {error}") from None
    found = [_key(_COMMENT.sub("", line).strip(), f"{path}:{n}") for n, line in enumerate(lines, 1)]
    return [key for key in found if key is not None]


def _key(line: str, where: str) -> Key | None:
    if not line:
        return None
    secret, *settings = line.split()
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{where}: a key must be of ASCII characters that can be seen")
    key = Key(digest=hashlib.sha256(secret.encode()).digest())
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "name" and value:
            key.name = value
        elif name == "max_outputs" and value.isascii() and value.isdigit() and int(value) > 0:
            key.max_outputs = int(value)
        elif name == "priorities":
            key.priorities = read_priorities(value, where)
        else:
            raise ConfigError(
                f"{where}: a key may be followed by name=NAME, max_outputs=N and"
                " priorities=LOW:HIGH"
            )
    return key


def read_priorities(text: str, where: str) -> range:
    """`LOW:HIGH`, both included. Raises ConfigError, which names `where` it stood."""
    match = _PRIORITIES.fullmatch(text)
    low, high = (0, -1) if match is None else map(int, match.groups())
    if not -MAX_PRIORITY <= low <= high <= MAX_PRIORITY:
        raise ConfigError(
            f"{where}: priorities must be LOW:HIGH, whole numbers of 32 bits, as in -10:100;"
            f" got {text!r}"
        )
    return range(low, high + 1)


def _given(headers: Mapping[str, str]) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _state(path: Path | None) -> tuple[int, int, int] | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
