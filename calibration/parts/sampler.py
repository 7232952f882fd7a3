"""The sampler: choice and confidence over the logits of masked positions, in passes over fp32 logits."""

from calibration.bench import Bench, Part, Value, row_of
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.units import GB


def measure(bench: Bench) -> Part:
    """Greedy sampling of one to eight blocks' logits."""
    part = Part("sampler")
    if bench.fused:
        from calibration.gpu import head

        head.measure(bench, part)
        return part
    vocabulary, block = bench.shape.vocab_size, bench.block_length
    sampler = Sampler(mask_token_id=bench.shape.mask_token_id)
    rate = bench.rate("machine.gpu.bandwidth_gb_s", "attention")
    tokens = (block, 4 * block) if bench.quick else (block, 4 * block, 16 * block)
    cases = {}
    for n in tokens:
        logits = bench.random(n, vocabulary).float()
        cases[str(n)] = lambda logits=logits: sampler(logits)
    timings = bench.time(cases)
    passes = {}
    for n in tokens:
        size = n * vocabulary * 4
        passes[n] = timings[str(n)].seconds * rate * GB / size
        part.rows.append(row_of(timings[str(n)], tokens=n, vocabulary=vocabulary, passes=round(passes[n], 3)))
    largest = max(tokens)
    part.values = [
        Value(
            "engine.sampler_passes",
            "passes",
            max(1.0, passes[largest]),
            spread=timings[str(largest)].spread,
            note=f"{largest} tokens of a vocabulary of {vocabulary}",
        )
    ]
    return part
