"""The doctor on this machine, and on machines it is told about."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from zhilight.driver import doctor
from zhilight.driver.device import NoDriver
from zhilight.errors import DeviceError


def run(capsys, *flags: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    code = doctor.main(parser.parse_args(flags))
    return code, capsys.readouterr().out


@pytest.fixture
def no_gpu(monkeypatch):
    def absent():
        raise NoDriver("No NVIDIA driver on this machine. Install it.")

    monkeypatch.setattr(doctor, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "driver_version", absent)


def test_json_and_text_agree_without_a_gpu(no_gpu, capsys):
    code, text = run(capsys)
    json_code, as_json = run(capsys, "--json")
    found = json.loads(as_json)
    assert code == json_code == (0 if found["usable"] else 1)
    assert found["gpus"] == [] and "No NVIDIA driver on this machine. Install it." in text
    assert found["packages"]["numpy"]["version"] in text
    assert set(found["libraries"]) == {"nvvm", "nvJitLink", "nccl"}
    for library in found["libraries"].values():
        assert library["path"] is None or library["path"] in text
    assert found["cache"]["path"] in text and found["cpu"]["cores"] >= 1


def test_an_unusable_driver_is_an_error(monkeypatch, capsys):
    def old():
        raise DeviceError("The NVIDIA driver is too old: update it.")

    monkeypatch.setattr(doctor, "device_count", old)
    code, text = run(capsys)
    assert code == 1 and "ERROR  The NVIDIA driver is too old" in text and "cannot run here" in text


def test_gpus_and_the_peer_matrix(monkeypatch, capsys, fake_device):
    class Stand:
        """Devices 0 and 1 reach each other, 2 is alone and too old."""

        def __init__(self, index):
            self.device = replace(fake_device, index=index, name=f"Card {index}",
                                  capability=(7, 5) if index == 2 else (9, 0))

        def __getattr__(self, name):
            return getattr(self.device, name)

        def memory_info(self):
            return 5 << 30, 8 << 30

        def can_access_peer(self, other):
            return self.index == other.index or {self.index, other.index} == {0, 1}

        def close(self):
            pass

        open = classmethod(lambda kind, index: kind(index))

    monkeypatch.setattr(doctor, "device_count", lambda: 3)
    monkeypatch.setattr(doctor, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(doctor, "Device", Stand)
    report = doctor.examine()
    assert report.peer_access == [[True, True, False], [True, True, False], [False, False, True]]
    text = "\n".join(doctor.render(report))
    assert "Card 0, capability 9.0, 132 multiprocessors, 8.0 GiB (5.0 GiB free)" in text
    assert "GPU 1 yes    yes    no" in text
    assert any("GPU 2 (Card 2) has capability 7.5" in error for error in report.errors)
    assert any("cannot read each other" in note for note in report.notes)


def test_missing_libraries_matter_only_with_a_gpu(monkeypatch):
    from cuda import pathfinder

    def nothing(name):
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nothing)
    without, with_gpu = doctor.Report(), doctor.Report(gpus=[{"index": 0}])
    doctor._libraries(without)
    doctor._libraries(with_gpu)
    assert without.usable and len(without.notes) == 3
    assert len(with_gpu.errors) == 2 and "NVVM" in with_gpu.errors[0] and "pip install" in with_gpu.errors[0]
    assert "NCCL" in with_gpu.notes[0]


def test_wrong_and_missing_packages_are_named_with_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "_requirements", lambda: [
        "numpy>=1.26,<2", "no-such-package-here>=3; sys_platform != 'win32'", "other-absent; sys_platform == 'win32'",
        "pytest>=8; extra == 'test'"])
    report = doctor.Report()
    doctor._packages(report)
    text = "\n".join(report.errors)
    assert "The package numpy is 2." in text and "pip install 'numpy" in text
    assert "1 packages are missing: pip install 'no-such-package-here>=3'." in text
    assert "other-absent" not in text and "pytest" not in report.packages


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    report = doctor.Report()
    doctor._cache(report)
    assert not report.cache["writable"] and "XDG_CACHE_HOME" in report.errors[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    report = doctor.Report()
    doctor._cache(report)
    assert report.cache["writable"] and report.cache["bytes"] == 0


def test_requirements_of_the_source_tree_are_read(monkeypatch):
    def absent(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    names = doctor._requirements()
    assert any(name.startswith("numpy>=") for name in names) and "numba-cuda[cu12]>=0.30.4" in names
