"""What a pass of whole blocks costs beyond products and bytes: ``mage-cpu``'s exchange with the CPU.

The steps wait for that pass. Its layers are launched one by one, for each waits for the CPU; queries, keys and values
of every token cross to the host and outputs come back. Runs at a prompt that is next to nothing tell, for few requests
and for many: what project and finish take longer than the profile so far predicts.
"""

from calibration.bench import Bench, Part, Value, row_of
from calibration.overheads import without_overheads
from calibration.points import Point
from calibration.reconcile import predictor
from calibration.timing import Timing

_METHOD, _RUNS = "mage-cpu", 2
REQUESTS = (1, 16)
STAGES = ("project", "finish")


def measure(bench: Bench, part: Part, stage_s: float) -> list[Value]:
    """``engine.exchange_project_us`` and ``engine.exchange_finish_us`` over query tokens; nothing without a GPU.

    ``stage_s`` is what a launch that does nothing takes.
    """
    if not bench.on_cuda:
        return []
    from calibration.gpu import launches
    from calibration.parts.launch import stage_timings

    # Nothing yet of what is found here; how many kernels a layer is matters for turns on a GPU only.
    profile = without_overheads(
        bench, [Value("engine.stage_overhead_us", "us", stage_s * 1e6, note="empty launches"), launches.padding()]
    )
    predict = predictor(profile, bench.shape, traced=True)
    rest: dict[str, dict[float, float]] = {name: {} for name in STAGES}
    spread = 0.0
    for requests in REQUESTS:
        point = _point(bench, requests)
        runs = [stage_timings(bench, bench.model, point) for _ in range(_RUNS)]
        predicted = predict(point).stages
        for name in STAGES:
            least = min((run[name] for run in runs), key=_seconds)
            rest[name][float(requests * bench.block_length)] = max(0.0, least.seconds - predicted[name])
            spread = max(spread, least.spread)
            columns = {"requests": requests, "foretold_s": predicted[name]}
            part.rows.append(row_of(least, case=f"exchange, {name}", **columns))
    note = f"{_METHOD}, {2 * bench.block_length} tokens; least of {_RUNS} medians, less what rates predict"
    return [_value(name, by_tokens, round(spread, 4), note) for name, by_tokens in rest.items()]


def _seconds(timing: Timing) -> float:
    return timing.seconds


def _value(name: str, by_tokens: dict[float, float], spread: float, note: str) -> Value:
    at = tuple(sorted(by_tokens))
    y = tuple(by_tokens[x] * 1e6 for x in at)
    return Value(f"engine.exchange_{name}_us", "us", y, at, "tokens", spread, note)


def _point(bench: Bench, requests: int) -> Point:
    block, kv = bench.block_length, str(bench.kv_dtype)
    return Point(_METHOD, 2 * block, requests, steps=min(4, block), blocks=4, block_length=block, kv_dtype=kv)
