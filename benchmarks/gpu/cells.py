"""Cells by name, and the plans: which cells stand for which exhibit, the most telling first."""

from dataclasses import dataclass, field

from herald_pipeline import methods
from herald_pipeline.errors import ConfigError, did_you_mean

KINDS = {
    "rates": 0,
    "pool": 2,
    "step": 3,
    "attention": 2,
    "proxy": 2,
    "run": 3,
    "ceiling": 3,
    "replicas": 3,
    "sustained": 3,
}
"""Kind -> how many positional parameters follow it."""
KEYS = {
    "T": int,
    "blocks": int,
    "budget": float,
    "link": float,
    "threads": int,
    "exact": str,
    "keys": str,
    "gather": str,
    "policy": str,
    "hbm": float,
    "gpus": int,
}
CEILINGS = (
    "full_kv_fetch_per_step",
    "sparse_fetch_per_step",
    "sparse_fetch_per_block",
    "cpu_32q_kernel",
    "cpu_1q_kernel",
    "gpu_full_kv_forward",
    "gpu_sparse_forward",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. ``what`` is a run's or step's method, or the name of a ceiling."""

    name: str
    kind: str
    what: str = ""
    context: int = 0
    batch: int = 0
    options: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """Name of its JSON file."""
        return self.name.replace(":", "-").replace("=", "") + ".json"


def parse(name: str) -> Cell:
    """A cell by its name.

    Raises
    ------
    ConfigError
        Unknown kind, method, ceiling or key; too few parameters; a number that is none.
    """
    kind, *rest = name.split(":")
    if kind not in KINDS:
        raise ConfigError(f"cell {name!r}: unknown kind{did_you_mean(kind, KINDS)}")
    given = [part for part in rest if "=" not in part]
    if len(given) != KINDS[kind]:
        raise ConfigError(f"cell {name!r}: {kind} takes {KINDS[kind]} parameters, got {len(given)}")
    what = given[0] if KINDS[kind] == 3 else ""
    valid = CEILINGS if kind == "ceiling" else methods.names() if what else ()
    if what and what not in valid:
        raise ConfigError(
            f"cell {name!r}: unknown {'ceiling' if kind == 'ceiling' else 'method'} {what!r}{did_you_mean(what, valid)}"
        )
    context, batch = (_number(text, name, int) for text in given[-2:]) if given else (0, 0)
    options = {}
    for part in rest:
        key, found, value = part.partition("=")
        if found and key not in KEYS:
            raise ConfigError(f"cell {name!r}: unknown key {key!r}{did_you_mean(key, KEYS)}")
        if found:
            options[key] = _number(value, name, KEYS[key])
    return Cell(name, kind, what, int(context), int(batch), options)


def _number(text: str, name: str, kind: type) -> float | int | str:
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"cell {name!r}: {text!r} must be a number") from None
    if not isinstance(value, str) and not value > 0:
        raise ConfigError(f"cell {name!r}: {text!r} must be above 0")
    return value


PLANS: dict[str, tuple[str, ...]] = {
    # A minute or two: whether every path runs at all.
    "shakedown": (
        "rates",
        "run:dense:32768:8:blocks=3",
        "run:herald:32768:8:blocks=3",
        "run:herald:32768:8:blocks=3:keys=only",
        "run:herald:32768:8:blocks=3:link=27.7:threads=8",
        "run:mage-cpu-representative:32768:8:blocks=3",
        "run:mage-offload:32768:2:blocks=2",
        "run:layer-prefetch:32768:1:blocks=2:T=4",
        "run:step-fetch:32768:1:blocks=2:T=4",
        "ceiling:gpu_sparse_forward:32768:8",
        "ceiling:full_kv_fetch_per_step:32768:8",
        "ceiling:cpu_1q_kernel:32768:8",
    ),
    # Nine minutes on an H200 machine with 16 vCPUs: headline, baselines, interventions, ceilings.
    "final": (
        "rates",
        "run:dense:32768:38",
        "run:dense:32768:80",
        "run:herald:32768:80",
        "run:herald:32768:80:exact=gpu",
        "run:herald:32768:80:keys=only",
        "run:herald:32768:38",
        "run:mage-cpu-representative:32768:80:blocks=4",
        "run:mage-offload:32768:16:blocks=2",
        "run:dense:16384:76",
        "run:dense:16384:160",
        "run:herald:16384:160",
        "run:herald:32768:38:T=8",
        "run:dense:32768:38:T=8",
        "run:herald:32768:38:T=32",
        "run:dense:32768:38:T=32",
        "run:herald:32768:38:threads=4",
        "run:herald:32768:38:threads=8",
        "run:herald:32768:38:link=27.7",
        "run:herald:32768:38:link=14",
        "run:herald:32768:38:budget=0.025",
        "run:herald:32768:38:budget=0.1",
        "run:herald:32768:38:exact=gpu",
        "run:herald:32768:38:keys=only",
        "run:herald:32768:38:keys=int8",
        "run:dense:32768:3:hbm=40",
        "run:mage-cpu-representative:32768:38:blocks=4",
        "run:mage-cpu:32768:16:blocks=4",
        "run:layer-prefetch:32768:2:blocks=2",
        "run:step-fetch:32768:4:blocks=2",
        "run:herald:32768:80:T=8",
        "run:herald:32768:80:T=32",
        "run:herald:16384:80",
        "run:dense:32768:16",
        "run:herald:32768:16",
        "run:mage-cpu-representative:16384:160:blocks=4",
        "run:layer-prefetch:32768:2:blocks=2:link=27.7",
        "ceiling:full_kv_fetch_per_step:32768:2",
        "ceiling:cpu_1q_kernel:32768:16",
        "ceiling:gpu_sparse_forward:32768:80",
        "ceiling:gpu_full_kv_forward:32768:38",
        "ceiling:cpu_32q_kernel:32768:16",
        "ceiling:sparse_fetch_per_step:32768:4",
        "ceiling:full_kv_fetch_per_step:32768:2:link=27.7",
        "ceiling:sparse_fetch_per_block:32768:80",
    ),
    # What the first plans left open on one GPU, in its own folder: the bases again, for one machine's noise is not
    # another's; then what binds otherwise as predicted, Fig. 5's two cells, and T at the largest batch.
    "missing": (
        "rates",
        "run:dense:32768:38",
        "run:herald:32768:80",
        "run:herald:32768:38",
        "sustained:dense:32768:38",
        "run:herald:32768:38:threads=16",
        "run:herald:32768:38:link=3",
        "run:herald:32768:80:T=8",
        "run:herald:32768:80:T=32",
        "run:mage-cpu:32768:16:blocks=4",
        "run:step-fetch:32768:4:blocks=2",
        "run:infinigen:32768:4:blocks=2",
        "run:mage-cpu-representative:32768:38:blocks=4",
        "sustained:herald:32768:80",
        "run:dense:32768:16",
        "run:dense:16384:76",
        "ceiling:full_kv_fetch_per_step:32768:2:link=27.7",
        "ceiling:sparse_fetch_per_block:32768:80",
        "ceiling:cpu_32q_kernel:32768:16",
    ),
    # Halves that take turns beside the whole batch, for each way to bring what is selected to the device; what the
    # host's memory gives by itself; and the baselines that were not fair before. About three minutes.
    "turns": (
        "rates",
        "run:herald:32768:80",
        "pool:32768:80",
        "run:herald:32768:80:policy=two-batch-overlap",
        "run:herald:32768:80:gather=gpu:exact=gpu",
        "run:herald:32768:80:gather=gpu:exact=gpu:policy=two-batch-overlap",
        "run:herald:32768:80:gather=gpu:exact=gpu:policy=two-batch-overlap:threads=16",
        "run:mage-cpu:32768:16:blocks=4",
        "run:infinigen:32768:4:blocks=2",
        "run:herald:32768:80:gather=gpu",
        "run:herald:32768:80:gather=gpu:policy=two-batch-overlap",
        "run:herald:32768:80:gather=gpu:keys=only",
        "run:herald:32768:80:gather=gpu:keys=only:policy=two-batch-overlap",
        "run:dense:32768:38",
    ),
    # 8-bit keys lie beside the full ones: their own process, for the memory that the others keep.
    "int8": (
        "run:herald:32768:16:keys=int8",
        "run:herald:32768:16:keys=int8:T=32",
        "run:herald:32768:16",
        "run:herald:32768:38:keys=int8",
    ),
    # What a profile of every method is compared with: baselines first, then HERALD's ways, and what needs most memory.
    "methods": (
        "rates",
        "run:step-fetch:32768:38:blocks=3:gather=gpu",
        "run:mage-cpu:32768:16:blocks=4",
        "ceiling:cpu_32q_kernel:32768:16",
        "run:infinigen:32768:4:blocks=2",
        "run:dense:32768:38",
        "run:herald:32768:80",
        "run:herald:32768:80:gather=gpu:keys=only:policy=two-batch-overlap",
        "run:herald:32768:80:gather=gpu:exact=gpu:policy=two-batch-overlap:threads=16",
        "run:ideal:32768:80",
        "run:mage-cpu-representative:32768:80:blocks=4",
        "run:step-fetch:32768:16:blocks=3:gather=gpu",
    ),
    # 8-bit keys, whose process ends before each ceiling's own begins.
    "int8-and-ceilings": (
        "run:herald:32768:38:keys=int8",
        "ceiling:gpu_full_kv_forward:32768:38",
        "ceiling:gpu_sparse_forward:32768:80",
        "ceiling:sparse_fetch_per_step:32768:38",
        "ceiling:cpu_1q_kernel:32768:16",
        "ceiling:full_kv_fetch_per_step:32768:2",
        "ceiling:sparse_fetch_per_block:32768:80",
    ),
    # Table II's LLaDA half: at the paper's batches and at Dense's own peak under the paper's 85.5 GB.
    "table2": (
        "rates",
        "run:dense:32768:38",
        "run:herald:32768:80",
        "run:herald:32768:38",
        "run:mage-cpu-representative:32768:80",
        "run:mage-offload:32768:16:blocks=2",
        "run:dense:16384:76",
        "run:herald:16384:160",
        "run:herald:16384:76",
        "run:mage-cpu-representative:16384:160",
        "run:mage-offload:16384:16:blocks=2",
    ),
    # Fig. 12: throughput by batch.
    "batches": tuple(f"run:{method}:32768:{batch}" for batch in (16, 8, 24, 60) for method in ("herald", "dense")),
    # Fig. 13: what each component brings, at one batch that all hold.
    "components": (
        "run:mage-offload:32768:16:blocks=2",
        "run:mage-cpu:32768:16",
        "run:mage-cpu-representative:32768:16",
        "run:herald:32768:16",
    ),
    # Fig. 14: throughput over T.
    "steps": tuple(f"run:{method}:32768:38:T={steps}" for steps in (8, 32, 20) for method in ("herald", "dense")),
    # Fig. 5: each ceiling by its protocol, and the method that should hit it.
    "ceilings": (
        *(f"ceiling:{name}:32768:16" for name in CEILINGS),
        "run:layer-prefetch:32768:16:blocks=2",
        "run:step-fetch:32768:38:blocks=2:gather=gpu",
        "run:mage-cpu:32768:16",
        "run:ideal:32768:16",
        "run:dense:32768:38",
        "ceiling:full_kv_fetch_per_step:32768:16:link=27.7",
        "run:layer-prefetch:32768:4:blocks=2:link=27.7",
        "run:mage-offload:32768:4:blocks=2:link=27.7",
        "run:herald:32768:38:link=27.7",
    ),
    # Table II's other half, on the machine whose host memory holds it: the paper's batches, and Dense at its own peak
    # under 85.5 GB (13 and 26) and without a limit (26 and 54). MAGE's are what the memory that HERALD filled holds.
    "sdar": (
        "rates",
        "run:herald:32768:34",
        "run:dense:32768:8",
        "run:dense:32768:13",
        "run:herald:16384:68",
        "run:dense:16384:15",
        "run:dense:16384:26",
        "run:mage-cpu-representative:32768:34:blocks=4",
        "run:mage-cpu-representative:16384:68:blocks=4",
        "run:mage-offload:32768:16:blocks=2",
        "run:mage-offload:16384:32:blocks=2",
        "run:mage-cpu:32768:8:blocks=3",
        "run:mage-cpu:16384:16:blocks=3",
        "run:dense:32768:26",
        "run:dense:16384:54",
        "run:herald:32768:34:exact=gpu",
        "run:herald:32768:34:keys=only",
        "run:herald:32768:17:threads=15",
        "run:herald:32768:13",
        "run:herald:32768:34:T=8",
        "run:herald:32768:34:T=32",
        "run:dense:32768:13:T=8",
        "run:mage-offload:32768:34:blocks=2",
        "run:mage-offload:16384:64:blocks=2",
    ),
    # Two HERALD replicas, a GPU each, with half of the host's cores each: together as many requests as one held.
    "replicas": ("replicas:herald:32768:17:gpus=2:threads=15",),
    "profile": ("step:herald:32768:80", "step:dense:32768:38", "attention:32768:80"),
}


def plan(name: str) -> list[Cell]:
    """Cells of a plan; ``all`` is every plan of llada2-mini but the shakedown and ``final``, each cell once."""
    if name == "all":
        order = ("table2", "steps", "components", "ceilings", "batches", "profile")
        names = dict.fromkeys(cell for part in order for cell in PLANS[part])
    elif name in PLANS:
        names = dict.fromkeys(PLANS[name])
    else:
        raise ConfigError(f"--plan: unknown plan {name!r}{did_you_mean(name, (*PLANS, 'all'))}")
    return [parse(cell) for cell in names]
