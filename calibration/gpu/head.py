"""LM head and choice on a GPU: what share of the peak they reach, what the choice adds, how fast the matrix is read."""

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.gpu import layers
from calibration.gpu.graphs import timed
from calibration.parts.gemm import peak_flops
from calibration.timing import Work
from herald_pipeline.units import GB
from herald_pipeline.work import WEIGHT_BYTES

TABLE = "head by positions"


def positions(bench: Bench) -> tuple[int, ...]:
    """Masked positions: half a block up to all positions of 80."""
    block = bench.block_length
    if not bench.on_cuda:
        return (block, 2 * block)
    return (block // 2, 8 * block, 20 * block, 40 * block, 80 * block)


def measure(bench: Bench, part: Part) -> None:
    """The fused head over random hidden states, by positions."""
    from herald_exec.cuda.kernels.head import Head

    weight, sizes = bench.model.weights.head, positions(bench)
    head = Head(weight, max(sizes), bench.shape.mask_token_id)
    cases: dict[str, Work] = {}
    for n in sizes:
        normed = bench.random(n, bench.shape.hidden_size)
        cases[str(n)] = lambda x=normed: head(x)  # type: ignore[misc]
    timings = timed(bench, cases)
    hbm = bench.rate("machine.gpu.bandwidth_gb_s", "attention") * GB
    peak, passes, reached = peak_flops(bench), {}, {}
    bench.tables[TABLE] = {float(n): timings[str(n)].seconds for n in sizes}
    vocabulary = weight.shape[0]
    for n in sizes:
        rest = timings[str(n)].seconds - layers.product_seconds(bench, n, weight.numel())
        reached[float(n)] = min(1.0, 2.0 * n * weight.numel() / timings[str(n)].seconds / peak)
        passes[n] = max(0.0, rest) * hbm / (n * vocabulary * 4.0)
        part.rows.append(row_of(timings[str(n)], tokens=n, vocabulary=vocabulary, passes=round(passes[n], 3)))
    # Of these sizes the one nearest to what a large batch's head sees: half of its positions.
    chosen = sizes[-2]
    note = f"head and choice over {chosen} positions of {vocabulary} tokens, less the head's product by gemm_efficiency"
    few = timings[str(sizes[0])]
    read = weight.numel() * WEIGHT_BYTES / few.seconds / hbm
    part.values = [
        Value(
            "engine.sampler_passes",
            "passes",
            max(0.01, passes[chosen]),
            spread=round(timings[str(chosen)].spread, 4),
            note=note,
        ),
        Value(
            "engine.head_efficiency",
            "share",
            tuple(reached.values()),
            tuple(reached),
            "positions",
            widest(timings.values()),
            f"head and choice together, {vocabulary} tokens",
        ),
        Value(
            "engine.weight_read_efficiency",
            "share",
            min(1.0, read),
            spread=round(few.spread, 4),
            note=f"the head's matrix over {sizes[0]} positions, choice included: the largest that is read at once; "
            "what small matrices lose to launches is in gemm_efficiency",
        ),
    ]
