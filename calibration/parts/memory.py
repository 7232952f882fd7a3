"""Memory: what the device and the host have, and what the runtime keeps of it. Read from the system, not timed."""

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
