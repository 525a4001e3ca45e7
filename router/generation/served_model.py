"""The model as clients see it: its name, its words, and how its answers are taken apart."""

import functools
import logging

from common.errors import InvalidRequest, ModelNotFound
from common.model_config import ModelConfig
from router.generation.ask import Ask, Chat, Texts, TokenIds
from router.generation.options import Options, Vocabulary
from router.generation.sampling_defaults import NEUTRAL, SamplingDefaults
from router.reading.json_body import shortened
from router.text.detokenizer import TokenTexts
from router.text.parsers import REASONING_MARKERS, REASONING_PARSERS, TOOL_PARSERS
from router.text.parts import MakeSplitter, PlainSplitter
from router.text.reasoning import ReasoningSplitter
from router.text.tokenizer import Tokenizer
from router.text.whole_calls import ListSplitter, NamedSplitter

log = logging.getLogger(__name__)

MAX_CUT_CONTEXTS = 4
"""Contexts of tokens that a prompt may have which will be cut to its end."""


class ServedModel:
    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        *,
        tool_parser: str = "hermes",
        reasoning_parser: str | None = None,
        keeps_tools_open: bool = False,
        defaults: SamplingDefaults = NEUTRAL,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.max_position_embeddings = config.max_position_embeddings
        self.vocabulary = Vocabulary(
            size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            encode=lambda text: self._known(tokenizer.encode_words(text), "bad_words"),
            takes_parts=tokenizer.template.takes_parts,
            keeps_tools_open=keeps_tools_open,
            defaults=defaults,
        )
        self._tool_parser = TOOL_PARSERS[tool_parser]
        self._reasoning_parser = reasoning_parser
        markers = REASONING_MARKERS + self._tool_parser.markers
        self._texts_with_markers = tokenizer.texts.showing(markers)
        self._has_strange = len(tokenizer.texts.parts) > config.vocab_size
        if self._has_strange:
            log.warning(
                "the tokenizer has ids up to %d, the model only %d rows: requests whose text needs "
                "a token beyond are refused",
                len(tokenizer.texts.parts) - 1, config.vocab_size,
            )  # fmt: skip

    def check_name(self, name: str | None) -> None:
        """A request that names no model means the one there is."""
        if name is not None and name != self.name:
            raise ModelNotFound(f"the model {shortened(name)} does not exist", param="model")

    # --- prompts ----------------------------------------------------------------------------------

    async def encode(self, ask: Ask, max_model_len: int) -> list[list[int]]:
        """The prompts of a request. Raises InvalidRequest, in the client's words."""
        options = ask.options
        name = options.names.prompt
        max_read = max_model_len * (1 if options.keeps_last is None else MAX_CUT_CONTEXTS)
        try:
            match ask.prompt:
                case TokenIds(prompts):
                    found = prompts
                case Texts(texts):
                    found = await self.tokenizer.encode_all(texts, max_read)
                case Chat():
                    found = [await self._encode_chat(ask.prompt, max_read)]
        except InvalidRequest as error:
            raise type(error)(error.message, param=name) from None
        return [self._known(_cut(prompt, options, max_model_len), name) for prompt in found]

    async def encode_chat(self, chat: Chat, max_tokens: int) -> list[int]:
        return self._known(await self._encode_chat(chat, max_tokens), "messages")

    async def _encode_chat(self, chat: Chat, max_tokens: int) -> list[int]:
        return await self.tokenizer.encode_chat(
            chat.messages,
            max_tokens,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continues,
            variables=chat.variables,
        )

    def _known(self, token_ids: list[int], param: str) -> list[int]:
        """Raises InvalidRequest for a token of the tokenizer that the model has no row for."""
        size = self.vocabulary.size
        if self._has_strange and max(token_ids, default=0) >= size:
            strange = next(token_id for token_id in token_ids if token_id >= size)
            text = self.tokenizer.texts.raw(strange).decode(errors="replace")
            raise InvalidRequest(
                f"the text holds {text!r} (token {strange}), which the model, of {size} tokens, "
                "does not know",
                param=param,
            )
        return token_ids

    # --- answers ----------------------------------------------------------------------------------

    def texts_for(self, options: Options) -> TokenTexts:
        """Markers of tool calls and reasoning are seen where somebody looks for them."""
        is_split = options.tools is not None or self._reasoning_parser is not None
        return self._texts_with_markers if is_split else self.tokenizer.texts

    def splitter(self, options: Options, prompt: list[int]) -> MakeSplitter | None:
        """What takes a chat's answers apart; None when they are content and nothing else."""
        tools = options.tools
        make: MakeSplitter | None = None
        if tools is not None:
            make = self._tool_parser.splitter
            if tools.is_named:
                make = functools.partial(NamedSplitter, tools.choice)
            elif tools.choice == "required":
                make = ListSplitter
        if self._reasoning_parser is None or options.sampling.grammar is not None:
            return make
        tail = b"".join(map(self.tokenizer.texts.raw, prompt[-16:])).decode("utf-8", "replace")
        is_open = tail.rfind("<think>") > tail.rfind("</think>")
        begins_inside = is_open or REASONING_PARSERS[self._reasoning_parser]
        inner = make or PlainSplitter
        return lambda: ReasoningSplitter(inner(), begins_inside=begins_inside)


def _cut(prompt: list[int], options: Options, max_model_len: int) -> list[int]:
    """The end of a prompt, where the client wants no more of it."""
    keeps = options.keeps_last
    if keeps is None:
        return prompt
    if keeps == -1:
        keeps = max(1, max_model_len - (options.max_tokens or 1))
    return prompt[-keeps:]
