"""Which share of a page goes through which NIC, where ranks of one worker read from another's.

Each rank reads its own heads' records over its own NIC, from ranks that hold them (common/ranks.py
says from which); the NIC with most to do decides how long a read takes.
"""

import functools
from collections import Counter

from common.ranks import Ownership, sources_of


def read_share(readers: Ownership) -> float:
    """Of the rank that reads most."""
    return max(map(len, readers)) / num_heads(readers)


@functools.cache
def sent_share(readers: Ownership, sources: Ownership) -> float:
    """Of the source's rank that is read from most. Several readers may hold one head: each reads
    it for itself.
    """
    sent = Counter(
        rank
        for reader in range(len(readers))
        for rank in sources_of(readers, sources, reader).values()
    )
    return max(sent.values()) / num_heads(readers)


def num_heads(ranks: Ownership) -> int:
    return len({head for heads in ranks for head in heads})
