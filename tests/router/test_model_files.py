"""What a model's files say about requests: sampling that generation_config.json advises, and a
tokenizer that knows more than the model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, UnsupportedModel
from common.model_config import ModelConfig
from router.generation.sampling_defaults import SamplingDefaults
from router.text.tokenizer import load_tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack

ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1}


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / model.name))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def sampling(stack: Stack, path: str = "/v1/completions", **body: Any) -> dict[str, float]:
    """What the worker was asked for, of what a model may advise."""
    worker = stack.workers[0]
    stack.do(worker.reset)
    response = stack.http.post(path, json={"max_tokens": 2} | body)
    assert response.status_code == 200, response.text
    found = worker.submitted[0].sampling
    return {name: getattr(found, name) for name in ADVICE}


def test_t45_the_model_s_advice_holds_where_the_client_says_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    model = copy_of(model_dir, tmp_path)
    change(model / "generation_config.json", do_sample=True, **ADVICE)
    messages = [{"role": "user", "content": "hi"}]
    with Stack(model, FakeWorker()) as stack:
        assert sampling(stack, prompt="a") == ADVICE
        assert sampling(stack, "/v1/chat/completions", messages=messages) == ADVICE
        assert sampling(stack, "/v1/messages", messages=messages) == ADVICE
        assert (
            sampling(stack, "/v1/responses", input="a", max_output_tokens=2, max_tokens=None)
            == ADVICE
        )
        own: Any = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "min_p": 0}
        assert sampling(stack, prompt="a", **own) == own
        assert sampling(stack, prompt="a", top_k=-1) == ADVICE | {"top_k": 0}
        assert sampling(stack, prompt="a", temperature=None) == ADVICE
        assert sampling(stack, "/v1/messages", messages=messages, temperature=1.0) == ADVICE | {
            "temperature": 1.0
        }
    with Stack(model, FakeWorker(), generation_config="off") as stack:
        neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "min_p": 0}
        assert sampling(stack, prompt="a") == neutral


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "0.6"}, "temperature is '0.6'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"min_p": True}, "min_p is True"),
    ],
)
def test_t45_advice_that_no_request_may_have_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=rf"{named}.*--generation-config off"):
        SamplingDefaults.load(tmp_path)


def test_t45_without_advice_nothing_is_assumed(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "top_k": -1}')
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()


def test_t19_tokens_that_the_model_has_no_row_for(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Added tokens beyond the embedding: a text with one is refused, others are served."""
    model = copy_of(model_dir, tmp_path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    added = tokenizer["added_tokens"][0] | {"id": size, "content": "<|more|>"}
    tokenizer["added_tokens"].append(added)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Stack(model, FakeWorker()) as stack:
        assert f"ids up to {size}" in caplog.text
        for path, body, param in (
            ("/v1/completions", {"prompt": "a <|more|> b"}, "prompt"),
            ("/v1/completions", {"prompt": ["a", "<|more|>"]}, "prompt"),
            ("/v1/completions", {"prompt": "a", "bad_words": ["<|more|>"]}, "bad_words"),
        ):
            response = stack.http.post(path, json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            assert f"'<|more|>' (token {size})" in error["message"]
        assert stack.complete("a b", max_tokens=2).status_code == 200
        # in a chat the client's own control tokens are plain text
        messages = [{"role": "user", "content": "<|more|>"}]
        chat = {"messages": messages, "max_tokens": 2}
        assert stack.http.post("/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("ids", [[2, 99_999_999], [-1, 2], 49_152])
def test_ends_of_text_that_the_model_does_not_have(
    model_dir: Path, tmp_path: Path, ids: Any
) -> None:
    model = copied(model_dir, tmp_path)
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json"):
        ModelConfig.load(str(model))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", '{"chat_template": [{"name": [], "template": "a"}]}', "no name"),
        ("tokenizer_config.json", "[" * 100_000, "nested too deeply"),
        ("chat_template.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_tokenizer_files_that_are_wrong(
    model_dir: Path, tmp_path: Path, name: str, content: str, says: str
) -> None:
    model = copied(model_dir, tmp_path)
    (model / "chat_template.jinja").unlink()
    (model / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as found:
        load_tokenizer(model)
    assert str(model) in str(found.value)


def test_a_token_id_beyond_all_reason(model_dir: Path, tmp_path: Path) -> None:
    model = copied(model_dir, tmp_path)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far away"] = 2_000_000_000
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has a token of id 2000000000"):
        load_tokenizer(model)


def copied(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "model"))
