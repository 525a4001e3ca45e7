"""What a simulated decode worker's host knows of requests beside the core, and what their clients
see: a record of each request, and all gaps between tokens.

A router that is told of a token which ends nothing would do nothing with it; so it is told of those
only when it has to submit the request anew.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.messages import Admitted, Failed, GenerateRequest, PrefillDone, TokenBatch
from common.scheduling.block_hash import HashChain
from common.types import FinishReason, OutputKey, RequestId, output_key
from simulator.records import Gaps, Record

Token = tuple[RequestId, int, FinishReason | None]


@dataclass(slots=True, eq=False)
class Client:
    record: Record
    token_id: int
    """Each of the request's tokens is this one."""
    chain: HashChain
    num_untold: int = 0
    """Tokens that the router was not told of."""


class Clients:
    def __init__(self, records: dict[RequestId, Record], gaps: Gaps) -> None:
        self._records = records
        self._gaps = gaps
        self._clients: dict[RequestId, Client] = {}
        self._token_ids: dict[OutputKey, int] = {}

    def __getitem__(self, request_id: RequestId) -> Client:
        return self._clients[request_id]

    def token_of(self, key: OutputKey) -> int:
        return self._token_ids[key]

    def add(self, request: GenerateRequest, chain: HashChain) -> None:
        record = self._records[request.request_id.partition("~")[0]]
        client = Client(record, -1 - record.number, chain)
        self._clients[request.request_id] = client
        self._token_ids[output_key(request.request_id, request.output_index)] = client.token_id

    def remove(self, request_id: RequestId) -> None:
        del self._clients[request_id]

    def told(self, message: object, now: float, seen_at: float) -> list[object]:
        """Those messages that the router is told for this one of the core."""
        match message:
            case TokenBatch():
                return self._tokens(message, seen_at)
            case Admitted(request_id=request_id):
                record = self._clients[request_id].record
                if record.admitted_s is None:
                    record.admitted_s = now
            case PrefillDone(request_id=request_id):
                record = self._clients[request_id].record
                if record.first_token_s is None:
                    record.num_cached_tokens = message.num_cached_tokens
            case Failed(request_id=request_id):
                client = self._clients[request_id]
                client.record.num_retries += not message.at_prefill
                untold: list[Token] = [(request_id, client.token_id, None)] * client.num_untold
                return [*_batches(untold), message]
        return [message]

    def _tokens(self, batch: TokenBatch, seen_at: float) -> list[object]:
        finished: list[Token] = []
        gaps: dict[float, int] = {}
        columns = zip(batch.request_ids, batch.token_ids, batch.finish_reasons, strict=True)
        for request_id, token_id, reason in columns:
            client = self._clients[request_id]
            record = client.record
            if record.first_token_s is None:
                record.first_token_s = seen_at
            else:
                gap = seen_at - record.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
                if gap > record.worst_gap_s:
                    record.worst_gap_s = gap
            record.last_token_s = seen_at
            record.num_tokens += 1
            if record.token_times is not None:
                record.token_times.append(seen_at)
            client.num_untold += 1
            if reason is not None:
                finished.append((request_id, token_id, reason))
        self._gaps.add_all(gaps)
        return _batches(finished)

    def took_quiet_steps(self, keys: Sequence[OutputKey], seen: list[float]) -> None:
        """Each of these outputs got a token at each of these instants."""
        gaps = [later - earlier for earlier, later in pairwise(seen)]
        counts = {gap: len(keys) * number for gap, number in Counter(gaps).items()}
        worst = max(gaps, default=0.0)
        for key in keys:
            client = self._clients[key.rpartition("/")[0]]
            record = client.record
            first_gap = seen[0] - record.last_token_s
            counts[first_gap] = counts.get(first_gap, 0) + 1
            record.worst_gap_s = max(record.worst_gap_s, first_gap, worst)
            record.last_token_s = seen[-1]
            record.num_tokens += len(seen)
            client.num_untold += len(seen)
            if record.token_times is not None:
                record.token_times += seen
        self._gaps.add_all(counts)


def _batches(tokens: list[Token]) -> list[object]:
    """One, or none without tokens."""
    if not tokens:
        return []
    request_ids, token_ids, reasons = zip(*tokens, strict=True)
    return [
        TokenBatch(
            request_ids=request_ids,
            output_indices=(0,) * len(tokens),
            token_ids=token_ids,
            finish_reasons=reasons,
        )
    ]
