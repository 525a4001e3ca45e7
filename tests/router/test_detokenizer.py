"""Incremental detokenising equals one-shot decoding, for both families of tokenizers."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from common.errors import UnsupportedModel
from router.text.detokenizer import Detokenizer, TokenTexts
from router.text.tokenizer import Tokenizer
from tests.router.kits import K1


def pieces(texts: TokenTexts, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(texts)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", K1)
def test_b04_every_kit_text_survives_one_id_at_a_time(
    tokenizer: Tokenizer, reference: HfTokenizer, text: str
) -> None:
    ids = tokenizer.encode_words(text)
    found = pieces(tokenizer.texts, ids)
    assert "".join(found) == reference.decode(ids, skip_special_tokens=True)
    if "<|im" not in text and "\x04" not in text:  # the vocabulary lacks byte 4
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=300)
@given(data=st.data())
def test_b04_any_ids_give_what_one_shot_decoding_gives(
    tokenizer: Tokenizer, reference: HfTokenizer, data: st.DataObject
) -> None:
    partial = st.sampled_from([143, 233, 190, 0, 1, 2, *range(100, 300)])
    ids = data.draw(st.lists(st.integers(0, 49151) | partial, max_size=40))
    found = "".join(pieces(tokenizer.texts, ids))
    assert found == reference.decode(ids, skip_special_tokens=True)
    found.encode()


def test_b04_a_lone_lead_byte_for_ever_is_sent_as_it_comes(tokenizer: Tokenizer) -> None:
    found = pieces(tokenizer.texts, [143] * 50)
    assert "".join(found) == "\ufffd" * 50
    assert all(len(piece) == 1 for piece in found[1:])


@pytest.mark.parametrize("text", [" world", " ", "  two", "\n x"])
def test_b131_a_leading_space_is_kept(
    tokenizer: Tokenizer, reference: HfTokenizer, text: str
) -> None:
    prompt = tokenizer.encode_words("Hello")
    ids = tokenizer.encode_words(text)
    decode = reference.decode
    assert "".join(pieces(tokenizer.texts, ids)) == decode(prompt + ids)[len(decode(prompt)) :]
    assert "".join(pieces(tokenizer.texts, [2, *ids])) == text


def test_ids_beyond_the_tokenizer_are_silent(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer.texts, [10**6])) == ""


def sentencepiece_like() -> HfTokenizer:
    """Words with a visible space, and every byte as a token, as Llama 2 and Mistral have."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁Hello",
        "▁",
        "▁▁",
        "wörld",
        "ing",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = HfTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@settings(max_examples=300)
@given(ids=st.lists(st.integers(1, 263), max_size=30))
def test_b04_byte_fallback_equals_one_shot_decoding(ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    texts = texts_of(tokenizer)
    # one-shot decoding strips one space at the very start, which belongs to the prompt
    whole = tokenizer.decode([tokenizer.token_to_id("ing") or 0, *ids], skip_special_tokens=True)
    assert "ing" + "".join(pieces(texts, ids)) == whole


def test_byte_fallback_characters_come_out_whole() -> None:
    tokenizer = sentencepiece_like()
    ids = [1 + byte for byte in "🦙é".encode()] + [tokenizer.token_to_id("▁Hello") or 0]
    assert "".join(pieces(texts_of(tokenizer), ids)) == "🦙é Hello"


def texts_of(tokenizer: HfTokenizer) -> TokenTexts:
    import json

    return TokenTexts.of(
        json.loads(tokenizer.to_str()), tokenizer.get_vocab(with_added_tokens=True)
    )


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = HfTokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        texts_of(tokenizer)


def test_b136_the_cost_per_token_is_flat(tokenizer: Tokenizer) -> None:
    ids = (tokenizer.encode_words("The quick brown fox 🦙 jumps. ") * 1000)[:8000]
    detokenizer = Detokenizer(tokenizer.texts)

    def time_of(part: list[int]) -> float:
        started = time.thread_time()
        for token_id in part:
            detokenizer.push(token_id)
        return (time.thread_time() - started) / len(part)

    costs = [time_of(ids[start : start + 500]) for start in range(0, 8000, 500)]
    assert min(costs[8:]) < 1.5 * min(costs[:8]) + 0.2e-6
    assert min(costs) < 50e-6
