"""POST /v1/chat/completions, and what the other protocols' chats share with it."""

import dataclasses
from typing import Any

from common.errors import InvalidRequest
from common.limits import MAX_LOGPROBS
from router.api.answering import Answering, Format
from router.api.calls import Body, GenerateEndpoint
from router.api.openai.chat_format import ChatFormat
from router.generation.ask import Ask, Chat, template_variables
from router.generation.options import (
    INT64,
    Options,
    Said,
    Vocabulary,
    read_options,
    read_stream_options,
)
from router.grammar.structured import read_response_format
from router.reading.fields import Fields
from router.reading.protocols import CHAT, Names
from router.text.chat_messages import normalized_messages
from router.text.chat_template import Message
from router.text.tools import framed_tool, listed_tools, read_choice, tool_use

NAMES = Names(prompt="messages")


class ChatEndpoint(GenerateEndpoint):
    path = "/v1/chat/completions"

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_chat(body.fields, vocabulary)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return ChatFormat(answering)


def read_chat(fields: Fields, vocabulary: Vocabulary) -> Ask:
    CHAT.read(fields)
    options = read_options(fields, vocabulary, _said(fields, vocabulary))
    chat = finished_chat(
        fields,
        options,
        normalized_messages(fields.take("messages"), takes_parts=vocabulary.takes_parts),
        effort=fields.text("reasoning_effort"),
    )
    echo = fields.boolean("echo", False)
    fields.finish()
    continued = _words(chat.messages[-1], chat.add_generation_prompt) if echo else ""
    return Ask(prompt=chat, options=options, continued=continued)


def _said(fields: Fields, vocabulary: Vocabulary) -> Said:
    newer = fields.integer("max_completion_tokens", 1, INT64)
    older = fields.integer("max_tokens", 1, INT64)
    name = "max_tokens" if newer is None else "max_completion_tokens"
    return Said(
        max_tokens=older if newer is None else newer,
        names=dataclasses.replace(NAMES, max_tokens=name),
        logprobs=_logprobs(fields),
        tools=tool_use(
            listed_tools(fields, framed_tool),
            read_choice(fields.take("tool_choice")),
            is_parallel=fields.boolean("parallel_tool_calls", True),
            keeps_open=vocabulary.keeps_tools_open,
        ),
        form=read_response_format(fields.object("response_format")),
        usage=read_stream_options(fields),
    )


def _logprobs(fields: Fields) -> int | None:
    has_logprobs = fields.boolean("logprobs", False)
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_top and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (num_top or 0) if has_logprobs else None


def finished_chat(
    fields: Fields,
    options: Options,
    messages: list[Message],
    *,
    effort: str | None,
    continues: bool = False,
) -> Chat:
    """The messages with what chats in all protocols may say to the template."""
    continues = fields.boolean("continue_final_message", continues)
    add_generation_prompt = fields.boolean("add_generation_prompt", not continues)
    if continues and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false",
            param="continue_final_message",
        )
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if options.tools is not None:
        variables["tools"] = list(options.tools.tools)
    return Chat(
        messages=messages,
        variables=variables | template_variables(fields),
        add_generation_prompt=add_generation_prompt,
        continues=continues,
    )


def _words(message: Message, add_generation_prompt: bool) -> str:
    """Those of a last message that the answer goes on with: of one role, they are one message."""
    if add_generation_prompt and message["role"] != "assistant":
        return ""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
