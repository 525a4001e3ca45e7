"""What a client may ask for: its key, the priorities it may have, whose prefixes it shares."""

import dataclasses
from dataclasses import dataclass

from common.errors import InvalidRequest
from router.admission.keys import DEFAULT_PRIORITIES, Key, KeyRing
from router.generation.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    keys: KeyRing
    priorities: range = DEFAULT_PRIORITIES
    """Those of a client whose key does not say otherwise."""
    salts_by_key: bool = True
    """Prefixes are shared within a key only."""

    def allowed(self, options: Options, key: Key | None) -> Options:
        """The options with the client's own salt and the priority that it gets. Raises
        InvalidRequest.
        """
        priorities = self.priorities if key is None else key.priorities or self.priorities
        # 0 is usual, or the next to it that is allowed
        usual = min(max(0, priorities.start), priorities.stop - 1)
        asked = usual if options.priority is None else -options.priority
        if asked not in priorities:
            whose = "without an API key" if key is None else "for this API key"
            raise InvalidRequest(
                f"priority must be from {priorities.start} to {priorities.stop - 1} {whose}"
                f" (lower is sooner), got {asked}",
                param="priority",
            )
        options = dataclasses.replace(options, priority=-asked)
        if key is None or not self.salts_by_key:
            return options
        return dataclasses.replace(options, cache_salt=key.salted(options.cache_salt))
