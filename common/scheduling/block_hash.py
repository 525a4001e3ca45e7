"""Names of block contents: a chain of 128-bit BLAKE2b hashes.

A block's hash covers the model, the block size, the tenant's salt, everything before the block
(through its parent's hash) and its own tokens. So equal hashes mean equal KV, also across workers,
and a page can be checked against the tokens that somebody asked for. A partly filled block is named
in the same way, over the tokens it has.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


def root_hash(model_fingerprint: bytes, block_size: int, salt: str = "") -> bytes:
    """Parent of every first block. Fields are length-prefixed, so different fields never
    concatenate alike.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"tandem-kv-root")
    for field in (model_fingerprint, block_size.to_bytes(4, "little"), salt.encode()):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


class HashChain:
    """Hashes of a growing list of tokens, full blocks in order."""

    def __init__(self, root: bytes, block_size: int) -> None:
        assert len(root) == HASH_BYTES
        self._root = root
        self._block_size = block_size
        self.full: list[bytes] = []
        self._rest = b""

    def extend(self, token_ids: NDArray[np.int32] | list[int]) -> None:
        data = self._rest + np.asarray(token_ids, dtype="<i4").tobytes()
        size = self._block_size * 4
        parent = self.full[-1] if self.full else self._root
        end = len(data) - len(data) % size
        for start in range(0, end, size):
            parent = _link(parent, data[start : start + size])
            self.full.append(parent)
        self._rest = data[end:]

    def copy(self) -> "HashChain":
        other = HashChain(self._root, self._block_size)
        other.full = self.full.copy()
        other._rest = self._rest
        return other

    @property
    def open(self) -> bytes | None:
        """Name of the partly filled last block; None when there is none."""
        if not self._rest:
            return None
        return _link(self.full[-1] if self.full else self._root, self._rest)


def _link(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(
        parent + tokens, digest_size=HASH_BYTES, person=b"tandem-kv-block"
    ).digest()


def block_hashes(root: bytes, block_size: int, token_ids: bytes) -> Iterator[bytes]:
    """Names of a prompt's full blocks, each made when it is asked for; `token_ids` are int32."""
    size = block_size * 4
    parent = root
    for start in range(0, len(token_ids) - size + 1, size):
        parent = _link(parent, token_ids[start : start + size])
        yield parent


class HashRoots:
    """Parents of first blocks, by tenant's salt."""

    def __init__(self, model_fingerprint: bytes, block_size: int) -> None:
        self._model_fingerprint = model_fingerprint
        self._block_size = block_size

    def root(self, salt: str) -> bytes:
        return root_hash(self._model_fingerprint, self._block_size, salt)
