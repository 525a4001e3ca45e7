"""Reads event streams the two ways clients do, and checks what every stream must keep."""

import json
from typing import Any

import httpx

Chunk = dict[str, Any]


def events(response: httpx.Response) -> list[Chunk]:
    """All chunks of a whole, successful stream. Checks its form."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    body = response.content.decode()
    blocks = body.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), body
    assert blocks.pop() == "data: [DONE]"
    by_spec = [json.loads(block.removeprefix("data: ")) for block in blocks]
    lines = [line for line in response.iter_lines() if line]
    by_lines = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert by_lines == by_spec
    return by_spec


def deltas(chunks: list[Chunk], index: int = 0) -> list[str]:
    """The text of each chunk of one choice that has any."""
    found = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                found.append(text)
    return [text for text in found if text]


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(deltas(chunks, index))


def finish_of(chunks: list[Chunk], index: int = 0) -> str:
    """The finish reason of one choice; it must come once, and last."""
    reasons = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    ]
    assert reasons[-1] is not None
    assert all(reason is None for reason in reasons[:-1])
    return str(reasons[-1])
