"""Greedy generation: with the key/value cache, without it, and by transformers' `generate` on a Bart of the same size.

    python benchmarks/generation.py                                  # 64 and 256 symbols, batches of 1 and 16
    python benchmarks/generation.py --lengths 64 --batches 1 --rounds 3 --json generation.json

All in one process, by turns (A B C A B C ...), the median of the rounds. Weights are random and no row stops early: every
way generates the same number of symbols from the same sources, its encoder included. Cached and uncached symbols are compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration

from core import Decoder, Encoder, EncoderDecoder, Learned, greedy

VOCABULARY, DIM, DEPTH, HEADS, HIDDEN, SOURCE, MOST = 1000, 256, 4, 8, 1024, 32, 512


def ours() -> EncoderDecoder:
    options: dict[str, Any] = {"position": Learned, "order": "post", "dropout": 0.0}
    encoder = Encoder(VOCABULARY, DIM, DEPTH, HEADS, HIDDEN, MOST, **options)
    return EncoderDecoder(encoder, Decoder(VOCABULARY, DIM, DEPTH, HEADS, HIDDEN, MOST, DIM, **options)).eval()


def theirs() -> BartForConditionalGeneration:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": DIM, "max_position_embeddings": MOST}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": DEPTH, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": HIDDEN}
    # forced_eos_token_id would end the last step by itself
    return BartForConditionalGeneration(BartConfig(**sizes, forced_eos_token_id=None)).eval()


def ways(model: EncoderDecoder, bart: BartForConditionalGeneration, source: Tensor, n: int) -> dict[str, Callable[[], Any]]:
    """Each generates `n` symbols for every row."""
    start = torch.zeros(len(source), 1, dtype=torch.long)

    def generate(cache: bool) -> list[list[int]]:
        with torch.no_grad():
            memory = model.encoder(source)
        return [found.tokens for found in greedy(model.decoder, start, memory, stop=(), max_length=n, cache=cache)]

    def bart_generate() -> Tensor:
        return bart.generate(
            source, attention_mask=torch.ones_like(source), num_beams=1, do_sample=False, min_new_tokens=n, max_new_tokens=n
        )

    return {"cached": lambda: generate(True), "uncached": lambda: generate(False), "transformers": bart_generate}


def measure(batch: int, n: int, rounds: int, model: EncoderDecoder, bart: BartForConditionalGeneration) -> dict[str, Any]:
    source = torch.randint(3, VOCABULARY, (batch, SOURCE))
    each = ways(model, bart, source, n)
    warm = ways(model, bart, source, 4)
    for way in warm.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in each}
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for name, way in each.items():
            start = time.perf_counter()
            found[name] = way()
            seconds[name].append(time.perf_counter() - start)
    # Both round differently: of two symbols that are as good as equally probable, either may be the first.
    same = sum(a == b for a, b in zip(found["cached"], found["uncached"], strict=True))
    if same < batch / 2:
        raise SystemExit(f"cached and uncached generation wrote the same symbols in {same} of {batch} rows only")
    if found["transformers"].shape[1] != n + 1 or {len(row) for row in found["cached"]} != {n}:
        raise SystemExit("not every way wrote the same number of symbols")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "batch": batch,
        "symbols": n,
        "seconds": seconds,
        "rows written alike": same,
        "median": median,
        "uncached / cached": median["uncached"] / median["cached"],
        "transformers / cached": median["transformers"] / median["cached"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256], help=f"symbols generated, below {MOST} (64 256)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="rows (1 16)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way (3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the processor (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, bart = ours(), theirs()
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, bart)]
    print(
        f"{sizes[0] / 1e6:.2f} M parameters (Bart {sizes[1] / 1e6:.2f} M), {options.threads} threads, torch {torch.__version__}"
    )
    print("batch symbols   cached uncached transformers  uncached/cached transformers/cached  rows alike")
    rows = []
    for batch in options.batches:
        for n in options.lengths:
            rows.append(row := measure(batch, n, options.rounds, model, bart))
            a, b, c = (f"{row['median'][name]:.2f} s" for name in ("cached", "uncached", "transformers"))
            ratios = row["uncached / cached"], row["transformers / cached"]
            print(
                f"{batch:5} {n:7} {a:>8} {b:>8} {c:>12} {ratios[0]:16.1f} {ratios[1]:19.2f} {row['rows written alike']:11}",
                flush=True,
            )
    if options.json:
        told = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, {options.threads} threads",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "parameters": {"ours": sizes[0], "transformers": sizes[1]},
            "rows": rows,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
