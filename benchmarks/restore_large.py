"""Time and peak memory of `vision restore` on one large picture, the whole command measured from outside.

    python benchmarks/restore_large.py                         # 3840x2160 through the full Restormer, streamed, at most 7 GB
    python benchmarks/restore_large.py --mode whole --width 960 --height 540

Weights are random: neither time nor memory depends on their values.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3840)
    parser.add_argument("--height", type=int, default=2160)
    parser.add_argument("--model", default="restormer", help="a restorer of vision.list_models()")
    parser.add_argument("--mode", default="stream", choices=("auto", "whole", "stream", "tile"))
    parser.add_argument("--memory", default="7GB", help="what the model's maps may take")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.manual_seed(0)
        vision.save_weights(vision.create_model(options.model), place / "model.safetensors")
        pixels = np.random.default_rng(0).integers(0, 256, (options.height, options.width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "picture.png", compress_level=1)
        command = [sys.executable, "-m", "vision", "restore", str(place / "picture.png"), "--output", str(place / "out")]
        command += ["--weights", str(place / "model.safetensors"), "--device", "cpu", "--mode", options.mode]
        command += ["--memory", options.memory]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(
        f"{options.model}, {options.width}x{options.height}, {options.mode}, --memory {options.memory}: "
        f"{seconds:.0f} s, peak {peak / 1e9:.2f} GB (RSS of the whole command), "
        f"{options.threads} threads, torch {torch.__version__}, {platform.machine()}"
    )


if __name__ == "__main__":
    main()
