"""A contest in a process of its own: what earlier ones left in memory, and what breaks, touches no other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import torch

from vision.bench.cases import load
from vision.bench.contest import Plan, Row, Setting
from vision.bench.run import contend
from vision.commands.allocator import keep_freed_memory


def contend_alone(setting: Setting, plan: Plan) -> Row:
    """What `contend` finds; a process that fails is a row that says so."""
    told = json.dumps({"setting": asdict(setting), "plan": asdict(plan)})
    done = subprocess.run([sys.executable, "-m", "vision.bench.alone", told], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(asdict(setting), failed=f"the process ended with {done.returncode}: {last}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    plan = Plan(**asked["plan"])
    keep_freed_memory()  # how often it comes anew from the system would depend on the side before, for any side
    torch.set_num_threads(plan.threads)
    setting = Setting(**asked["setting"])
    print(json.dumps(asdict(contend(load(setting.case).contest(setting), plan))))
