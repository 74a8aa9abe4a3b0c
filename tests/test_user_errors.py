"""The mistakes a new user makes, from the command line: one message that names the way out, no traceback, exit code 1 or 2.

The messages' details are tested beside the code that raises them; here it is what reaches the terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as bindings

from tests.engine.tiny_llama import MAX_LEN, write_tiny_llama
from zhilight import LLM, SamplingParams, cli
from zhilight.driver import device
from zhilight.errors import ConfigError, DeviceError, OutOfMemory, RequestError

CPU = ["--device", "cpu", "--cpu-kv-cache-gb", "0.01"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def variant(model: Path, tmp_path: Path) -> Callable[..., str]:
    """The tiny model in a folder of its own, some keys of its config.json changed and some files taken away."""

    def make(*removed: str, **changes: object) -> str:
        folder = shutil.copytree(model, tmp_path / "variant")
        for name in removed:
            (folder / name).unlink()
        if changes:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | changes))
        return str(folder)

    return make


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs a command that must print exactly one line on standard error, holding all the parts, and nothing else."""

    def run(words: list[str], *parts: str, code: int = 2) -> None:
        assert cli.main(words) == code
        printed = capsys.readouterr()
        assert not printed.out
        (line,) = printed.err.splitlines()
        for part in parts:
            assert part in line

    return run


# ---- the model ---------------------------------------------------------------------------------------------------


def test_a_folder_without_a_model(fails, tmp_path):
    fails(["generate", str(tmp_path), "--prompt", "x", *CPU], "ConfigError", "no config.json (it holds nothing)", '"demo"')
    (tmp_path / "notes.txt").write_text("")
    fails(["generate", str(tmp_path), "--prompt", "x", *CPU], "it holds notes.txt")


def test_a_path_that_is_not_there(fails):
    fails(["generate", "./no/such/model", "--prompt", "x", *CPU], "'./no/such/model'", "Check the path")


def test_an_architecture_that_is_not_built_is_named_with_those_that_are(fails, variant):
    folder = variant(architectures=["GPT2LMHeadModel"])
    fails(["generate", folder, "--prompt", "x", *CPU], "UnsupportedModel", "GPT2LMHeadModel", "LlamaForCausalLM, ",
          "Qwen2ForCausalLM")


def test_a_quantisation_that_is_not_built(fails, model, variant):
    folder = variant(quantization_config={"quant_method": "awq", "bits": 4})
    fails(["generate", folder, "--prompt", "x", *CPU], "UnsupportedModel", "'awq'", "unquantised", "GGUF")
    fails(["generate", str(model), "-q", "gptq", "--prompt", "x", *CPU], "UnsupportedModel", "'gptq'", "Leave it out")


def test_pickles_only(fails, variant):
    folder = variant("model.safetensors")
    (Path(folder) / "pytorch_model.bin").write_bytes(b"\x80\x04")
    fails(["generate", folder, "--prompt", "x", *CPU], "CheckpointError", "pytorch_model.bin", "save_pretrained", code=1)


def test_no_weights(fails, variant):
    fails(["generate", variant("model.safetensors"), "--prompt", "x", *CPU], "no *.safetensors", "load_format=dummy", code=1)


def test_no_tokenizer(fails, variant):
    folder = variant("tokenizer.json")
    fails(["generate", folder, "--prompt", "x", *CPU], "ConfigError", "no tokenizer in", "tokenizer.json", "tokenizer setting")
    llm = LLM(folder, device="cpu", cpu_kv_cache_gb=0.01, skip_tokenizer_init=True)
    greedy = SamplingParams(temperature=0, max_tokens=2)
    assert len(llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids) == 2
    with pytest.raises(RequestError, match="give prompt_token_ids"):
        llm.generate("abc", greedy)


def test_the_demo_model_without_a_place_to_keep_it(fails, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    fails(["generate", "demo", "--prompt", "x", *CPU], "/proc/no/zhilight", "XDG_CACHE_HOME")


def test_a_setting_that_does_not_exist():
    with pytest.raises(ConfigError, match="no setting 'max_model_length'; did you mean 'max_model_len'"):
        LLM("demo", max_model_length=5)
    with pytest.raises(ConfigError, match=r"no setting 'zzz'\. The settings are .* tokenizer, "):
        LLM("demo", zzz=5)


# ---- lengths and memory ------------------------------------------------------------------------------------------


def test_a_context_longer_than_the_model(fails, model):
    fails(["generate", str(model), "--max-model-len", "100000", "--prompt", "x", *CPU], "max_model_len is 100000",
          f"Lower it to {MAX_LEN}")


def test_a_context_longer_than_the_kv_cache(fails, model):
    fails(["generate", str(model), "--max-model-len", str(MAX_LEN), "--num-kv-blocks", "2", "--prompt", "x", *CPU],
          f"max_model_len is {MAX_LEN} but the KV cache holds 128 tokens", "num_kv_blocks")


@pytest.mark.parametrize(("flags", "limit", "way_out"), [
    (["--num-kv-blocks", "2"], 128, "enlarge the KV cache, which holds 128 tokens: raise num_kv_blocks"),
    (["--max-model-len", "64"], 64, "or raise max_model_len"),
    ([], MAX_LEN, "the model was made for no more"),
])
def test_a_prompt_that_is_too_long(fails, model, flags, limit, way_out):
    words = ["generate", str(model), *flags, *CPU, "--prompt"]
    fails([*words, "x" * 1000], f"The prompt has 1000 tokens; the longest context is {limit}", "Shorten the prompt", way_out)
    fails([*words, "xyz", "--max-tokens", "1000"], "together 1003", "lower max_tokens", way_out)


def test_not_even_one_kv_block(fails, model):
    fails(["generate", str(model), "--prompt", "x", "--device", "cpu", "--cpu-kv-cache-gb", "0.000001"], "one KV block takes",
          "Raise cpu_kv_cache_gb")


def test_more_memory_than_the_machine_has(fails, model, monkeypatch):
    fails(["generate", str(model), "--prompt", "x", "--device", "cpu", "--cpu-kv-cache-gb", "1000000"], "OutOfMemory",
          "the KV cache", "GiB of memory", "Lower cpu_kv_cache_gb", code=1)
    monkeypatch.setattr("zhilight.ops.cpu.host_memory", lambda: 1 << 10)
    with pytest.raises(OutOfMemory, match=r"the weights .* 1\.0 KiB of memory.*smaller model"):
        LLM(str(model), device="cpu")


# ---- the device --------------------------------------------------------------------------------------------------


def test_no_gpu(model):
    """In a process of its own, from which a GPU that is there is hidden."""
    run = subprocess.run([sys.executable, "-m", "zhilight.cli", "generate", str(model), "--prompt", "x", "--device", "cuda"],
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert "NVIDIA" in line
    assert "device=cpu" in line
    assert not run.stdout


def stand_in_driver(monkeypatch: pytest.MonkeyPatch, version: int) -> SimpleNamespace:
    success = bindings.CUresult.CUDA_SUCCESS
    stand_in = SimpleNamespace(cuDriverGetVersion=lambda: (success, version), cuInit=lambda flags: (success,),
                               cuDeviceGetCount=lambda: (success, 1), CUresult=bindings.CUresult)
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    monkeypatch.setattr(device, "_bindings_major", lambda: 12)
    monkeypatch.setattr(device, "_load", device._load.__wrapped__)  # neither read nor fill the process's cache
    return stand_in


@pytest.mark.parametrize("choice", ["cuda", "auto"])
def test_a_driver_that_is_too_old(fails, model, monkeypatch, choice):
    stand_in_driver(monkeypatch, 11080)
    fails(["generate", str(model), "--prompt", "x", "--device", choice], "DeviceError", "supports CUDA 11.8",
          "needs 12.0 or later", "Update the driver", "device=cpu", code=1)


def test_a_gpu_that_is_too_old(model, monkeypatch):
    import_module("zhilight.ops.cuda")  # with the real bindings
    stand_in_driver(monkeypatch, 12090)
    turing = SimpleNamespace(index=0, name="Tesla T4", capability=(7, 5), close=lambda: None)
    monkeypatch.setattr(device.Device, "open", staticmethod(lambda index: turing))
    with pytest.raises(DeviceError, match=r"Tesla T4\) has compute capability 7\.5.*need 8\.0 or later.*device=cpu"):
        LLM(str(model), device="cuda", dtype="float16")


# ---- the server and the command line -----------------------------------------------------------------------------


def test_a_package_that_is_missing(fails, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "zhilight.engine.llm", None)  # its import fails: a fault of ours keeps its traceback
    with pytest.raises(ModuleNotFoundError):
        cli.main(["generate", str(model), "--prompt", "x", *CPU])
    monkeypatch.delitem(sys.modules, "zhilight.engine.llm")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    fails(["generate", str(model), "--prompt", "x", *CPU], "tokenizers is not installed", "zhilight doctor", code=1)


def test_a_port_that_is_taken(fails, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(["serve", str(model), *CPU, "--host", "127.0.0.1", "--port", str(port)], f"port {port}", "in use",
              "Choose another --port")


def test_a_server_that_cannot_start_says_why_once(variant):
    """The reason comes from the engine's process, of the same class as offline, and is not printed twice."""
    folder = variant(architectures=["GPT2LMHeadModel"])
    run = subprocess.run([sys.executable, "-m", "zhilight.server.openai.entrypoints.api_server", folder, *CPU, "--port", "0"],
                         capture_output=True, text=True)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith("UnsupportedModel: architecture GPT2LMHeadModel is not built")


def test_a_server_without_a_gpu_says_why_once(model):
    run = subprocess.run([sys.executable, "-m", "zhilight.cli", "serve", str(model), "--device", "cuda", "--port", "0",
                          "--log-level", "error"],
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("DeviceError: ")
    assert "device=cpu" in line


@pytest.mark.parametrize(("words", "parts"), [
    (["generate", "x", "--no-such-flag"], ["--no-such-flag", "zhilight generate --help"]),
    (["serve", "x", "--max-modle-len", "5"], ["--max-modle-len", "zhilight serve --help"]),
    (["generate", "--prompt", "x"], ["no model is given", '"demo"']),
    (["kernels", "compile", "--capability", "7.5"], ["capability is 7.5", "8.0 or later"]),
    (["kernels", "report", "--capability", "9.0a", "--match", "zzz"], ["'zzz'", "zhilight kernels list"]),
    (["kernels", "report", "--capability", "ten"], ["'ten'", "9.0a"]),
])
def test_flags_that_do_not_exist_or_make_no_sense(fails, words, parts):
    fails(words, "ConfigError", *parts)
