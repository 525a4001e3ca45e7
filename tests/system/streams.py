"""Streamed requests on threads of their own, and the texts that they must give."""

import itertools
import json
import socket
import threading
import time
from typing import Any

import httpx

from bench.cluster import Cluster


def body_of(c: Cluster, prompt: list[int], max_tokens: int, salt: int) -> dict[str, Any]:
    """Sampled with a seed; a first token of its own keeps prompts out of each other's prefix
    cache.
    """
    return {
        "model": c.model.name,
        "prompt": [1000 + salt, *prompt],
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": salt,
        "ignore_eos": True,
        "stream": True,
    }


class Stream:
    """One streamed request on a thread of its own."""

    def __init__(
        self, c: Cluster, prompt: list[int], max_tokens: int, salt: int, **fields: Any
    ) -> None:
        self._body = body_of(c, prompt, max_tokens, salt) | fields
        self._url = c.url
        self.text = ""
        self.times: list[float] = [time.monotonic()]
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.num_tokens = 0
        self.first = threading.Event()
        self._http = httpx.Client(base_url=self._url, timeout=60)
        self._has_left = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                self._http,
                self._http.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        self._chunk(json.loads(line[6:]))
        except (httpx.HTTPError, httpx.StreamError, OSError, RuntimeError):
            if not self._has_left:
                raise

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self.error = self.error or chunk.get("error")
        if chunk.get("choices"):
            choice = chunk["choices"][0]
            self.times.append(time.monotonic())
            self.text += choice["text"]
            self.num_tokens += len(choice.get("token_ids") or [0])
            self.first.set()

    def may_break(self) -> None:
        """The connection will be lost: that is no failure of this stream."""
        self._has_left = True

    def leave(self) -> None:
        """The client goes away: its connection is closed under it."""
        self.may_break()
        for connection in self._http._transport._pool.connections:  # type: ignore[attr-defined]
            stream = connection._connection._network_stream
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, within_s: float) -> None:
        self._thread.join(within_s)
        assert self.has_ended, "the stream hangs"

    def join(self) -> str:
        self._thread.join(60)
        assert self.error is None, self.error
        assert self.is_done
        return self.text

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


def undisturbed(c: Cluster, prompt: list[int], max_tokens: int, salt: int, **fields: Any) -> str:
    """What the same request gives in peace (and without the prefix that it leaves behind)."""
    return Stream(c, prompt, max_tokens, salt, **fields).join()
