"""`tandem calibrate`: measures a model's means of K and V on a text, and keeps them."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from commands.config import CalibrateConfig
from common.environment import available_cores
from common.model_config import ModelConfig
from engine.calibration import CHUNK_TOKENS, measure, read_tokens, spread
from engine.config import EngineConfig
from engine.load import load_runner
from engine.offsets import means_hash, save_means
from engine.pool_size import PoolSize

WINDOW_TOKENS = 1024
NUM_WINDOWS = 24

Report = Callable[[str], None]


def run(config: CalibrateConfig, report: Report) -> int:
    tokens = read_tokens(config.model, config.text)
    window = min(WINDOW_TOKENS, ModelConfig.load(config.model).longest) // 16 * 16
    engine = EngineConfig(
        model=config.model,
        kv_codec="fp32",
        pool=PoolSize(num_packed=WINDOW_TOKENS // 16, num_exact=1),
        max_model_len=window,
        num_threads=config.threads or available_cores(),
        max_num_tokens=CHUNK_TOKENS,
    )
    runner = load_runner(engine)
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
