"""What a matcher may use, the same in the router's compiler and in every worker."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.limits import MASK_ITEMS, MASK_LEXER_FUEL, MAX_LEXER_STATES, MAX_ROW_ITEMS


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Never raises: a matcher that cannot be used says so (`is_error`)."""
    limits = LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_lexer_fuel=MASK_LEXER_FUEL,
        step_max_items=MASK_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
