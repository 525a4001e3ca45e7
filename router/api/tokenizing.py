"""POST /tokenize and /detokenize."""

from functools import partial
from typing import Any

from starlette.types import Scope

from router.generation.ask import Chat, template_variables
from router.generation.service import TextService
from router.reading.fields import Fields
from router.reading.json_body import is_within
from router.server.exchange import Endpoint, Exchange, large_json, to_json
from router.text.chat_messages import normalized_messages

MAX_DETOKENIZED = 262_144
"""Token ids, where the context does not hold more of them."""
_LARGE = 2048


class _TokenizerCall(Endpoint):
    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(type(self).__name__, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        body = await exchange.json_object(self._max_body_bytes)
        fields = Fields(body)
        self._service.model.check_name(fields.text("model"))
        result = await self.result(fields)
        is_large = not is_within(result, _LARGE)
        write = partial(large_json if is_large else to_json, result)
        await exchange.reply(200, await self._service.threads.run_if(is_large, write))

    async def result(self, fields: Fields) -> dict[str, Any]:
        raise NotImplementedError


class Tokenize(_TokenizerCall):
    """The ids that a prompt, or the messages of a chat, would have."""

    async def result(self, fields: Fields) -> dict[str, Any]:
        model, limit = self._service.model, self._service.max_model_len
        given = fields.take("messages")
        prompt = fields.text("prompt")
        add_special_tokens = fields.boolean("add_special_tokens", True)
        add_generation_prompt = fields.boolean("add_generation_prompt", True)
        variables = template_variables(fields)
        fields.finish()
        if (given is None) == (prompt is None):
            raise fields.wrong("prompt", "or messages must be given, and not both", prompt)
        if prompt is None:
            messages = normalized_messages(given, takes_parts=model.vocabulary.takes_parts)
            chat = Chat(
                messages=messages,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
            )
            ids = await model.encode_chat(chat, limit)
        else:
            ids = await model.tokenizer.encode(prompt, limit, add_special_tokens=add_special_tokens)
        return {"count": len(ids), "max_model_len": limit, "tokens": ids}


class Detokenize(_TokenizerCall):
    """The text of token ids, special tokens left out."""

    async def result(self, fields: Fields) -> dict[str, Any]:
        service = self._service
        given = fields.take("tokens")
        fields.finish()
        limit = max(MAX_DETOKENIZED, service.max_model_len)
        if isinstance(given, list) and len(given) > limit:
            raise fields.wrong("tokens", f"must hold at most {limit} token ids", len(given))

        def decode() -> str:
            ids = fields.token_ids("tokens", given, service.model.vocabulary.size)
            return service.model.tokenizer.decode(ids)

        is_large = isinstance(given, list) and len(given) > _LARGE
        return {"prompt": await service.threads.run_if(is_large, decode)}
