"""Prompts with right answers, for `tandem quality --tasks FILE`: how much of fp32's accuracy a
codec keeps.

A line of the file is a JSON object of one of two forms:

    {"prompt": "...", "choices": ["...", "..."], "answer": 0}    the likeliest choice is the answer
    {"prompt": "...", "answer": "..."}                           what greedy decoding goes on with
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from common.errors import ConfigError
from engine.calibration import plans_of
from engine.runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`answer` is an index into `choices`; None: the only one must be what the model would say."""

    prompt: NDArray[np.int32]
    choices: tuple[NDArray[np.int32], ...]
    answer: int | None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + max(len(choice) for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    name: str
    num_right: int
    num_tasks: int

    @property
    def share(self) -> float:
        return self.num_right / self.num_tasks


def read_tasks(model: str | Path, path: str | Path, max_tokens: int) -> list[Task]:
    """Raises ConfigError, which names the line."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tasks = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _task(tokenizer, json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="tasks") from None
        if task.num_tokens > max_tokens:
            raise ConfigError(
                f"{path}, line {number}: {task.num_tokens} tokens, the model takes {max_tokens}",
                param="tasks",
            )
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} has no tasks", param="tasks")
    return tasks


def _task(tokenizer: Tokenizer, given: Any) -> Task:
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise ValueError("a task is an object with a prompt and an answer")
    answer = given.get("answer")
    if "choices" not in given:
        if not isinstance(answer, str):
            raise ValueError("without choices the answer is a text")
        texts, answer = [answer], None
    else:
        texts = given["choices"]
        is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        if not is_list or len(texts) < 2:
            raise ValueError("choices must be a list of at least two texts")
        if isinstance(answer, bool) or not isinstance(answer, int):
            raise ValueError("the answer to choices is the number of the right one, from 0 on")
        if not 0 <= answer < len(texts):
            raise ValueError(f"there is no choice {answer}")
    prompt = _ids(tokenizer, given["prompt"])
    choices = tuple(_ids(tokenizer, text) for text in texts)
    if not len(prompt) or not all(len(choice) for choice in choices):
        raise ValueError("a text has no tokens")
    return Task(prompt=prompt, choices=choices, answer=answer)


def _ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def accuracy_of(name: str, runner: ModelRunner, tasks: Sequence[Task], block_size: int) -> Accuracy:
    num_right = sum(_is_right(runner, task, block_size) for task in tasks)
    return Accuracy(name=name, num_right=num_right, num_tasks=len(tasks))


def _is_right(runner: ModelRunner, task: Task, block_size: int) -> bool:
    scores = [score(runner, task.prompt, choice, block_size) for choice in task.choices]
    if task.answer is None:
        return scores[0][1]
    return int(np.argmax([likelihood for likelihood, _ in scores])) == task.answer


def score(
    runner: ModelRunner, prompt: NDArray[np.int32], choice: NDArray[np.int32], block_size: int
) -> tuple[float, bool]:
    """Log-likelihood of `choice` after `prompt`; whether each of its tokens is the likeliest."""
    tokens = np.concatenate([prompt, choice])
    # plans take whole blocks; what stands after a token does not touch it
    padded = np.append(tokens, np.zeros(-len(tokens) % block_size, dtype=np.int32))
    likelihood, is_greedy = 0.0, True
    for plan in plans_of(padded, block_size):
        if not plan.chunks:
            runner.execute(plan)
            continue
        logits = runner.all_logits(plan)
        start, count = plan.chunks[0].start, plan.chunks[0].num_tokens
        # row r predicts token start + r + 1
        first = max(len(prompt) - 1, start) - start
        end = min(len(tokens) - 1, start + count) - start
        if end <= first:
            continue
        targets = torch.from_numpy(tokens[start + first + 1 : start + end + 1].astype(np.int64))
        rows = torch.log_softmax(logits[first:end], dim=-1)
        likelihood += float(rows.gather(1, targets[:, None]).sum())
        is_greedy &= bool((rows.argmax(1) == targets).all())
    return likelihood, is_greedy
