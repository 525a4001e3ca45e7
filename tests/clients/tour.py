"""A tour of the server with one official client.

Run by the interpreter of `.venv-clients`, where the clients are; nothing of ours is there.

    python tour.py CLIENT HTTP_URL GRPC_ADDRESS MODEL

Ends with 0 when everything was as it should be.
"""

import asyncio
import json
import queue
import sys
from typing import Any

URL, GRPC, MODEL = "", "", ""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "color"],
    "additionalProperties": False,
}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"name": "paint", "description": "Paints", "parameters": SCHEMA}


def check_value(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "color"}, value
    assert value["color"] in ("red", "green", "blue"), value


def check_param(found: object, expected: str) -> None:
    assert found == expected, found


def check_text(found: object) -> None:
    assert isinstance(found, str), found
    assert found


def tour_openai() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    chat: Any = client.chat.completions.create
    whole = chat(model=MODEL, messages=PARIS, temperature=0, max_tokens=24, logprobs=True)
    text = whole.choices[0].message.content
    assert "Paris" in text, text
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    options = {"include_usage": True}
    chunks = list(
        chat(
            model=MODEL,
            messages=PARIS,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options=options,
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    form = {"type": "json_schema", "json_schema": {"name": "toy", "schema": SCHEMA}}
    formed = chat(model=MODEL, messages=PARIS, response_format=form, max_tokens=64)
    check_value(formed.choices[0].message.content)
    tools = [{"type": "function", "function": TOOL}]
    called = chat(
        model=MODEL,
        messages=PARIS,
        tools=tools,
        tool_choice="required",
        max_tokens=128,
        parallel_tool_calls=False,
    )
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "paint"
    check_value(call.function.arguments)
    again: Any = [
        *PARIS,
        called.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert chat(model=MODEL, messages=again, max_tokens=4).choices[0].message.role == "assistant"
    completion = client.completions.create(
        model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0, n=2, echo=True
    )
    assert [c.text.split(",")[0] for c in completion.choices] == ["One", "One", "A", "A"]
    response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    assert response.output_text
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created", kinds
    try:
        client.chat.completions.create(model="other", messages=PARIS)  # type: ignore[arg-type]
        raise AssertionError("an unknown model was served")
    except openai.NotFoundError:
        pass
    try:
        chat(model=MODEL, messages=PARIS, temperature=9)
        raise AssertionError("a wrong temperature was served")
    except openai.BadRequestError as error:
        check_param(error.param, "temperature")
    asyncio.run(_openai_async())


async def _openai_async() -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        calls = [
            client.completions.create(model=MODEL, prompt=f"{n}:", max_tokens=3) for n in range(8)
        ]
        assert len(await asyncio.gather(*calls)) == 8


def tour_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    create: Any = client.messages.create
    greedy = {"temperature": 0}  # the client has no argument for it any more
    message = create(
        model=MODEL, max_tokens=24, messages=PARIS, system="Be brief.", extra_body=greedy
    )
    text = message.content[0].text
    assert text, message
    assert message.stop_reason in ("end_turn", "max_tokens")
    stream_of: Any = client.messages.stream
    with stream_of(
        model=MODEL, max_tokens=24, messages=PARIS, system="Be brief.", extra_body=greedy
    ) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    tool = {"name": "paint", "description": "Paints", "input_schema": SCHEMA}
    called = create(
        model=MODEL,
        max_tokens=128,
        messages=PARIS,
        tools=[tool],
        tool_choice={"type": "tool", "name": "paint"},
    )
    (block,) = [b for b in called.content if b.type == "tool_use"]
    assert block.input["color"] in ("red", "green", "blue")
    count = client.messages.count_tokens(model=MODEL, messages=PARIS)  # type: ignore[arg-type]
    assert count.input_tokens > 5
    try:
        create(model=MODEL, max_tokens=0, messages=PARIS)
        raise AssertionError("max_tokens of 0 was served")
    except anthropic.BadRequestError:
        pass


def tour_tritonclient() -> None:
    import numpy as np
    import tritonclient.grpc as triton
    import tritonclient.http as triton_http
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(GRPC)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata().name == "tandem"
    assert client.get_model_metadata(MODEL).inputs[0].name == "text_input"

    def inputs(kind: Any, text: str, stream: bool) -> list[Any]:
        given = kind.InferInput("text_input", [1], "BYTES")
        given.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
        sampling = kind.InferInput("sampling_parameters", [1], "BYTES")
        fields = json.dumps({"temperature": "0", "max_tokens": 8}).encode()
        sampling.set_data_from_numpy(np.array([fields], dtype=np.object_))
        flag = kind.InferInput("stream", [1], "BOOL")
        flag.set_data_from_numpy(np.array([stream]))
        return [given, flag, sampling]

    whole = client.infer(MODEL, inputs(triton, "The capital of France is", False))
    (text,) = whole.as_numpy("text_output")
    assert b"Paris" in text, text
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    client.async_stream_infer(MODEL, inputs(triton, "The capital of France is", True))
    pieces = []
    while True:
        result, error = found.get(timeout=30)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0])
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    assert b"".join(pieces) == text
    assert len(pieces) > 3
    http = triton_http.InferenceServerClient(URL.removeprefix("http://"))
    assert http.is_server_ready()
    assert http.is_model_ready(MODEL)
    assert http.get_model_config(MODEL)["input"][0]["name"] == "text_input"
    assert client.get_model_config(MODEL).config.backend == "tandem"
    assert [model["state"] for model in http.get_model_repository_index()] == ["READY"]
    for infer in (
        lambda: http.infer("other", inputs(triton_http, "x", False)),
        lambda: http.infer(MODEL, inputs(triton_http, "x", False)[1:]),
        lambda: http.get_model_metadata("other"),
        lambda: client.infer("other", inputs(triton, "x", False)),
    ):
        try:
            infer()
            raise AssertionError("a wrong call was served")
        except InferenceServerException as error:
            check_text(error.message())
    over_http = http.infer(MODEL, inputs(triton_http, "The capital of France is", False))
    (http_text,) = over_http.as_numpy("text_output")
    assert http_text in (text, text.decode())


def tour_litellm() -> None:
    import litellm

    fields: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "messages": PARIS,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole: Any = litellm.completion(**fields)
    text = whole.choices[0].message.content
    assert "Paris" in text
    pieces: Any = litellm.completion(**fields, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    completion: Any = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="One, two,",
        max_tokens=4,
        api_base=f"{URL}/v1",
        api_key="none",
    )
    assert completion.choices[0].text


def tour_langchain() -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=64
    )
    message = chat.invoke("What is the capital of France?")
    assert "Paris" in str(message.content)
    pieces = [piece.content for piece in chat.stream("What is the capital of France?")]
    assert "".join(map(str, pieces)) == message.content
    schema = SCHEMA | {"title": "Toy", "description": "A toy"}
    formed: Any = chat.with_structured_output(schema, method="json_schema").invoke("A toy")
    assert formed["color"] in ("red", "green", "blue")
    bound = chat.bind_tools([{"type": "function", "function": TOOL}], tool_choice="paint")
    (call,) = bound.invoke("Paint it").tool_calls
    assert call["name"] == "paint"
    assert call["args"]["color"] in ("red", "green", "blue")


def tour_instructor() -> None:
    from typing import Literal

    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Toy(BaseModel):
        name: str = Field(max_length=8)
        color: Literal["red", "green", "blue"]

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched: Any = instructor.from_openai(client, mode=mode)
        toy = patched.chat.completions.create(
            model=MODEL, response_model=Toy, messages=PARIS, max_tokens=96, max_retries=0
        )
        assert toy.color in ("red", "green", "blue")


def tour_gateway() -> None:
    """Through a gateway that is starting: the client tries again until it answers."""
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="sk-any", max_retries=12)
    create: Any = client.messages.create
    message = create(model=MODEL, max_tokens=24, messages=PARIS, system="Be brief.")
    assert message.content[0].text, message
    stream_of: Any = client.messages.stream
    with stream_of(model=MODEL, max_tokens=24, messages=PARIS) as stream:
        assert "".join(stream.text_stream)
    tool = {"name": "paint", "description": "Paints", "input_schema": SCHEMA}
    called = create(
        model=MODEL, max_tokens=128, messages=PARIS, tools=[tool], tool_choice={"type": "any"}
    )
    (block,) = [b for b in called.content if b.type == "tool_use"]
    check_value(json.dumps(block.input))


TOURS = {
    "gateway": tour_gateway,
    "openai": tour_openai,
    "anthropic": tour_anthropic,
    "tritonclient": tour_tritonclient,
    "litellm": tour_litellm,
    "langchain": tour_langchain,
    "instructor": tour_instructor,
}

if __name__ == "__main__":
    _, name, URL, GRPC, MODEL = sys.argv
    TOURS[name]()
