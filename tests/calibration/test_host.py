import pytest

from calibration.host import Host, check_same_machine, pcie, this_host
from herald_pipeline.errors import ConfigError, ProfileError


def test_a_profile_of_another_machine_is_refused_with_what_differs(profile):
    with pytest.raises(ProfileError) as refused:
        check_same_machine(profile, Host("Some CPU", 2, 2, "avx2"))
    message = str(refused.value)
    assert "is of another machine" in message
    assert "cores: 52 there, 2 here" in message
    assert "python -m calibration measure" in message


def test_a_profile_of_this_machine_is_accepted(profile):
    cpu, gpu = profile.machine.cpu, profile.machine.gpu
    check_same_machine(profile, Host(cpu.name, cpu.cores, cpu.threads, cpu.capability, gpu.name, gpu.count))


def test_pcie_is_read_as_generation_and_lanes():
    assert pcie("5x16") == (5, 16)


@pytest.mark.parametrize("text", ["5", "7x16", "5x3", "x", "5x16x"])
def test_pcie_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="GENERATIONxLANES"):
        pcie(text)


def test_this_machine_has_a_name_and_a_file_name():
    host = this_host()
    assert host.cpu_name
    assert host.threads >= 1
    assert host.slug.startswith("cpu-only_")
    assert " " not in host.slug
