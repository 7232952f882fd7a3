"""Memory: what the device and the host have, and what the runtime keeps of it. Read from the system, not timed."""

import math
from pathlib import Path

import psutil
import torch

from calibration.bench import Bench, Part, Value
from herald_pipeline.units import GB


def measure(bench: Bench) -> Part:
    """Capacities; without a GPU, host memory is the device's memory too."""
    host = host_limit_bytes() if bench.host_gb is None else round(bench.host_gb * GB)
    part = Part("memory")
    if bench.on_cuda:
        # The context has to exist before free memory says what the runtime takes.
        torch.zeros(1, device=bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        device, note = total, ""
        runtime = total - free
    else:
        device, runtime, note = host, 0, "host memory: the emulated GPU and the host share it"
    logits = Value("engine.logit_bytes", "B", 4.0, datasheet="herald-exec samples from fp32 logits")
    part.values = [
        Value("machine.gpu.memory_gb", "GB", device / GB, note=note),
        Value(
            "machine.dram.capacity_gb",
            "GB",
            host / GB,
            note="the least of total memory and the control group's limit" if bench.host_gb is None else "",
            datasheet="" if bench.host_gb is None else "stated with --host-gb",
        ),
        Value("engine.usable_memory_share", "share", (device - runtime) / device),
        logits,
    ]
    if runtime:
        part.values.append(Value("engine.runtime_gb", "GB", runtime / GB))
    part.rows = [
        {"memory": "device", "bytes": device},
        {"memory": "host", "bytes": host},
        {"memory": "runtime", "bytes": runtime},
    ]
    return part


def free_bytes(host_gb: float | None = None) -> float:
    """Host memory that this process can still have: of ``host_gb`` where they are stated, else of its own limit."""
    memory = psutil.virtual_memory()
    if host_gb is not None:
        # What a virtual machine shows may grow as it is touched, and what is in use is no less for that.
        return host_gb * GB - float(memory.total - memory.available)
    return min(float(memory.available), _control_group_free())


def _control_group_free() -> float:
    """What the control group's limit leaves; file pages that it would give back are free."""
    for folder, limit, used, key in _CONTROL_GROUPS:
        files = [Path(folder) / name for name in (limit, used, "memory.stat")]
        if not all(file.is_file() for file in files):
            continue
        texts = [file.read_text(encoding="ascii").strip() for file in files]
        if texts[0].isdigit():
            cached = dict(line.split() for line in texts[2].splitlines()).get(key, "0")
            return float(int(texts[0]) - int(texts[1]) + int(cached))
    return math.inf


_CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_limit_bytes() -> int:
    """Host memory that this process may use: what is there, or the control group's limit where that is less."""
    limit = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(path)
        if file.is_file():
            text = file.read_text(encoding="ascii").strip()
            if text.isdigit():
                limit = min(limit, int(text))
    return limit
