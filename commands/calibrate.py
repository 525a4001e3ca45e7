"""`tandem calibrate`: measures a model's means of K and V on a text, and keeps them."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from commands.config import CalibrateConfig
from common.environment import available_cores
from common.model_config import ModelConfig
from engine.calibration import CHUNK_TOKENS, measure, read_tokens, spread
from engine.offsets import means_hash, save_means
from engine.runner import load_runner

WINDOW_TOKENS = 1024
NUM_WINDOWS = 24

Report = Callable[[str], None]


def run(config: CalibrateConfig, report: Report) -> int:
    tokens = read_tokens(config.model, config.text)
    window = min(WINDOW_TOKENS, ModelConfig.load(config.model).longest) // 16 * 16
    runner = load_runner(
        config.model,
        codec="fp32",
        num_blocks=WINDOW_TOKENS // 16,
        max_model_len=window,
        num_exact=1,
        num_threads=config.threads or available_cores(),
        max_num_tokens=CHUNK_TOKENS,
    )
    windows = spread(tokens, window, NUM_WINDOWS)
    report(f"measuring the means of K and V over {len(windows)} x {window} tokens")
    means = measure(runner, windows)
    about = {
        "text_sha256": hashlib.sha256(Path(config.text).read_bytes()).hexdigest(),
        "tokens": str(windows.size),
    }
    path = save_means(config.model, means, about)
    report(f"wrote {path}, hash {means_hash(means).hex()}; workers read it when they start")
    return 0
