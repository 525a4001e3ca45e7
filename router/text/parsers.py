"""How answers are taken apart, by the names that the options have."""

from dataclasses import dataclass

from router.text.calls import HermesSplitter, LlamaSplitter, MistralSplitter
from router.text.parts import MakeSplitter


@dataclass(frozen=True, slots=True)
class ToolParser:
    """`markers` are tokens that must be seen in the text though they are special."""

    splitter: MakeSplitter
    markers: tuple[str, ...]


TOOL_PARSERS = {
    "hermes": ToolParser(HermesSplitter, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolParser(LlamaSplitter, ("<|python_tag|>",)),
    "mistral": ToolParser(MistralSplitter, ("[TOOL_CALLS]", "[ARGS]")),
}

REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}
"""Whether an answer begins with reasoning even when nothing says so."""

REASONING_MARKERS = ("<think>", "</think>")


def guessed_tool_parser(template: str) -> str:
    """The format that a model's chat template teaches."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3_json"
    return "hermes"
