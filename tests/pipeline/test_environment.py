"""Variables with our prefix are known or refused; every one that the code reads is in the list."""

import re
from pathlib import Path

import pytest

from herald_pipeline.environment import KNOWN, check_environment, threads_problem, usable_cores
from herald_pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_a_misspelled_variable_is_refused_with_the_closest():
    with pytest.raises(ConfigError) as error:
        check_environment({"HERALD_CPUU": "avx2", "HERALD_X": "1", "PATH": "/bin"})
    assert error.value.problems[0] == "environment variable HERALD_CPUU is not known; did you mean 'HERALD_CPU'?"
    assert len(error.value.problems) == 2


def test_known_variables_and_those_of_others_pass():
    check_environment({"HERALD_CPU": "avx2", "HERALDRY": "x", "OMP_NUM_THREADS": "1"})


def test_as_many_threads_as_cores_pass_and_one_more_does_not():
    cores = usable_cores()
    assert threads_problem(None) is threads_problem(1) is threads_problem(cores) is None
    problem = threads_problem(cores + 1, "--threads")
    assert problem.startswith(f"--threads must be <= {cores}, the cores that this process may use, got {cores + 1}")


def test_every_variable_that_the_code_reads_is_known():
    packages = ("herald_pipeline", "herald_sim", "herald_exec", "calibration", "reports")
    read = {
        name
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"environ[\w.\[(]*\"(HERALD_\w+)\"", path.read_text())
    }
    assert read <= set(KNOWN)
