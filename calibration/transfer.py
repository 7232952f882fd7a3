"""Blind transfer: a profile of a machine that nobody here has, from what another one reached and datasheets.

Each raw rate is the target's nominal rate times the **derate** of the measured machine (reached / nominal); shares and
overheads are taken over as they are. No result of the target machine goes in, so that comparing the profile with the
paper is a prediction: it is written and committed first, and compared afterwards.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration import profile_file
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import Profile
from herald_sim.exhibits.targets import HARDWARE, targets

EXHIBITS = ("Table II", "Fig 5")
PARTS = "datasheets"


@dataclass
class Sheets:
    """Datasheet numbers of the measured machine and of the target, and the derates that were found."""

    measured: Mapping[str, Any]
    target: Mapping[str, Any]
    derates: dict[str, str] = field(default_factory=dict)

    def ratio(self, key: str) -> float:
        """The target's nominal number over the measured machine's."""
        return _value(self.target, key) / _value(self.measured, key)


def datasheet(name: str) -> dict[str, Any]:
    """Datasheet numbers of a machine.

    Raises
    ------
    ConfigError
        There is none of that name.
    """
    folder = hardware_io.profile_dir() / PARTS
    path = folder / f"{name}.toml"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
        raise ConfigError(f"no datasheet numbers of {name!r} in {folder}; there are: {there}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def transfer(hardware: Path, target: str, out: Path, command: str) -> Path:
    """Write the profile of ``target`` that follows from the measured one at ``hardware``.

    Raises
    ------
    ConfigError
        The file is there (a prediction is made once), or datasheet numbers are missing.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; a blind prediction is made once: name another file")
    source = profile_file.read(hardware_io.find(hardware))
    name = str(source.get("name", hardware.stem))
    sheets = Sheets(datasheet(name), datasheet(target))
    machine = _machine(source["machine"], sheets, name)
    engine = {
        key: _kept(value, name) for key, value in source["engines"][profile_file.ENGINE].items() if key != "title"
    }
    engine["usable_memory_share"] = _usable(machine, engine, name)
    data = {
        "name": f"{target}.transferred",
        "title": f"{sheets.target['gpu']}, {sheets.target['cpu']}: predicted from {name} and datasheets",
        "engine": profile_file.ENGINE,
        "notes": [
            f"Nothing was measured on this machine, no result of it went in; efficiencies are those of {name}.",
            "Clocks of the two CPUs are taken as equal.",
            *(f"{key}: {text}" for key, text in sheets.derates.items()),
        ],
        "machine": machine,
        "engines": {profile_file.ENGINE: {"title": f"herald-exec as measured on {name}", **engine}},
    }
    profile_file.write(out, data, [f"Blind transfer, by: {command}"])
    return out


def _machine(source: Mapping[str, Any], sheets: Sheets, name: str) -> dict[str, Any]:
    target = sheets.target
    gpu, cpu, dram, link = (source[section] for section in ("gpu", "cpu", "dram", "link"))
    threads = sheets.ratio("cpu_threads")
    pcie = sheets.ratio("pcie_coded_gb_s")

    def rate(table: Mapping[str, Any], key: str, nominal: str) -> dict[str, Any]:
        share = _peak(table) / _value(sheets.measured, nominal)
        sheets.derates[key] = f"{share:.3f} of nominal ({_peak(table):.4g} of {_value(sheets.measured, nominal):g})"
        return _scaled(
            table, sheets.ratio(nominal), f"derate {share:.3f} measured on {name}", target[nominal]["source"]
        )

    read = min(_value(target, "dram_nominal_gb_s"), _peak(dram["read_gb_s"]) * threads)
    sheets.derates["machine.dram.read_gb_s"] = (
        f"threads bound the measured machine ({_peak(dram['read_gb_s']):.4g} GB/s on "
        f"{_value(sheets.measured, 'cpu_threads'):g}); here the nominal rate bounds, which is not derated"
    )
    sheets.derates["machine.cpu.attention_tflop_s"] = f"times {threads:.3g}, the ratio of hardware threads"
    copies = {
        key: rate(link[key], f"machine.link.{key}", "pcie_coded_gb_s")
        if key != "duplex_gb_s"
        else _scaled(link[key], pcie, f"as measured on {name}", "both directions, by the ratio of nominal link rates")
        for key in ("h2d_gb_s", "d2h_gb_s", "duplex_gb_s")
        if key in link
    }
    return {
        "gpu": {
            "name": target["gpu"],
            "count": 1,
            "dtype": gpu.get("dtype", "bf16"),
            "memory_gb": _stated(target["gpu_memory_gb"], "GB"),
            "bandwidth_gb_s": rate(gpu["bandwidth_gb_s"], "machine.gpu.bandwidth_gb_s", "gpu_bandwidth_gb_s"),
            "peak_tflop_s": rate(gpu["peak_tflop_s"], "machine.gpu.peak_tflop_s", "gpu_peak_tflop_s"),
        },
        "cpu": {
            "name": target["cpu"],
            "cores": int(_value(target, "cpu_cores")),
            "threads": int(_value(target, "cpu_threads")),
            "capability": target["cpu_capability"],
            "attention_tflop_s": _scaled(
                cpu["attention_tflop_s"], threads, f"per thread as on {name}", target["cpu_threads"]["source"]
            ),
        },
        "dram": {
            "capacity_gb": _stated(target["dram_capacity_gb"], "GB"),
            "read_gb_s": {
                "value": read,
                "unit": "GB/s",
                "provenance": "datasheet",
                "source": f"the lesser of nominal ({target['dram_nominal_gb_s']['source']}) and threads as on {name}",
            },
        },
        "link": {"kind": "pcie", "generation": target["pcie_generation"], "lanes": target["pcie_lanes"], **copies},
    }


def _value(sheet: Mapping[str, Any], key: str) -> float:
    if key not in sheet:
        raise ConfigError(f"datasheet numbers of {sheet.get('name')!r} lack {key}; add it with its source")
    return float(sheet[key]["value"])


def _peak(table: Mapping[str, Any]) -> float:
    if "value" not in table and "y" not in table:
        stated = ", ".join(f"{key} = {value!r}" for key, value in table.items()) or "nothing"
        raise ProfileError(
            f"a rate of the profile states {stated} in place of a measured number: transfer one that "
            "calibration measure wrote"
        )
    return float(table["value"] if "value" in table else max(table["y"]))


def _stated(number: Mapping[str, Any], unit: str) -> dict[str, Any]:
    return {"value": number["value"], "unit": unit, "provenance": "datasheet", "source": number["source"]}


def _scaled(table: Mapping[str, Any], factor: float, how: str, source: str) -> dict[str, Any]:
    """A rate of the measured machine times the ratio of nominal rates."""
    kept = {key: table[key] for key in ("x", "x_unit", "unit") if key in table}
    values = {"y": [y * factor for y in table["y"]]} if "y" in table else {"value": table["value"] * factor}
    return {**kept, **values, "provenance": "datasheet", "source": f"{source}; {how}"}


def _kept(table: Any, name: str) -> Any:
    """An efficiency or a fixed cost as it was measured elsewhere; counts and sizes stay what they are."""
    if not isinstance(table, Mapping) or table.get("provenance") != "measured":
        return table
    kept = {key: table[key] for key in ("x", "y", "value", "x_unit", "unit") if key in table}
    return {**kept, "provenance": "assumed", "source": f"as measured on {name}"}


def _usable(machine: Mapping[str, Any], engine: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All of the memory but what the runtime took there."""
    total = _peak(machine["gpu"]["memory_gb"])
    runtime = _peak(engine["runtime_gb"]) if "runtime_gb" in engine else 0.0
    share = (total - runtime) / total
    return {"value": share, "unit": "share", "provenance": "assumed", "source": f"all but the runtime's, as on {name}"}


# The comparison ------------------------------------------------------------------------------------------------------


def judge(blind: Profile, fitted: str = HARDWARE) -> list[dict[str, Any]]:
    """Table II and Fig. 5: printed, predicted blind, and by the profile that was fitted to them."""
    reference = hardware_io.resolve(fitted)
    rows = []
    for target in targets():
        if target.exhibit not in EXHIBITS:
            continue
        row: dict[str, Any] = {"name": target.key, "batch": target.batch, "published": target.published}
        for label, profile in (("blind", blind), ("fitted", reference)):
            value = _predicted(target.predict, profile)
            row[label] = value
            row[f"{label}_error"] = None if value is None else value / target.published - 1
        rows.append(row)
    return rows


def _predicted(predict: Callable[[Profile], float], profile: Profile) -> float | None:
    """The value, or ``None`` where the profile lacks a number of that method."""
    try:
        return predict(profile)
    except ProfileError:
        return None
