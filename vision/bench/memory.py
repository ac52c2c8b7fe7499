"""Peak memory of one side, in a process that does nothing else."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from vision.bench.cases import load
from vision.bench.contest import Setting
from vision.bench.work import prepare, stepper
from vision.errors import UserError


def peak(setting: Setting, side: str, threads: int) -> dict[str, int]:
    """Bytes of the whole process at their highest, and of the steps alone (above what weights and libraries take).

    Raises:
        UserError: the process failed.
    """
    told = json.dumps({"setting": asdict(setting), "side": side, "threads": threads})
    done = subprocess.run([sys.executable, "-m", "vision.bench.memory", told], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"the process that measures {side}'s memory failed ({last[0]}); use --no-memory to go without")
    return json.loads(done.stdout.splitlines()[-1])


def measure(setting: Setting, side: str) -> dict[str, int]:
    contest = load(setting.case).contest(setting)
    module = prepare(contest.sides[side].build(), setting)
    step = stepper(contest.sides[side], module, setting)
    if setting.device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "step_bytes": torch.cuda.max_memory_allocated() - before}
    if setting.compiled:
        step()  # the compiler's own memory is not the step's
        forget_highest()
    before = resident()
    for _ in range(2):
        step()
    return {"peak_bytes": highest(), "step_bytes": max(highest() - before, 0)}


def resident() -> int:
    """Bytes that the process takes now; on systems that do not tell, the most that it has taken."""
    return from_status("VmRSS:") or highest()


def highest() -> int:
    # Not getrusage where it can be avoided: on Linux it starts with what the parent process took.
    return from_status("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_highest() -> None:
    """Linux only: the highest so far is what the process takes now."""
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")


def from_status(name: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    print(json.dumps(measure(Setting(**asked["setting"]), asked["side"])))
