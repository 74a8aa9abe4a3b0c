"""Build a model, take its memory and fill it from a checkpoint (or with random numbers)."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.errors import CheckpointError, ConfigError, UnsupportedModel
from zhilight.layers.module import Parameter, Part
from zhilight.models.model import Model
from zhilight.models.registry import build_model
from zhilight.ops.base import Ops
from zhilight.weights.checkpoint import Checkpoint
from zhilight.weights.source import ModelSource

logger = logging.getLogger(__name__)

_LISTED = 10


@dataclass(frozen=True)
class _Target:
    parameter: Parameter
    part: Part


def load_model(engine_config: EngineConfig, model_config: ModelConfig, source: ModelSource, ops: Ops,
               progress: bool = True) -> Model:
    """The model, ready to run on `ops`. Shows a progress bar on standard error when `progress` and it is a terminal.

    Raises UnsupportedModel; ConfigError when load_format does not fit the files; CheckpointError when tensors are missing,
    unknown or of a wrong shape (all of them are named), or a file cannot be read.
    """
    if engine_config.quantization is not None:
        raise UnsupportedModel(f"quantization is {engine_config.quantization!r}; built are unquantised (bfloat16, float16, "
                               "float32) checkpoints and GGUF files, which need no such setting. Leave it out.")
    start = time.monotonic()
    model = build_model(model_config, engine_config.max_model_len)
    if engine_config.load_format == "dummy":
        model.materialize(ops)
        _fill_random(model, ops)
    else:
        checkpoint = open_checkpoint(engine_config.load_format, model_config, source)
        targets = match_tensors(model, checkpoint)
        model.materialize(ops)
        _copy(checkpoint, targets, ops, progress)
    ops.synchronize()
    logger.debug("%s weights of %s ready in %.2f s", engine_config.load_format, source.path, time.monotonic() - start)
    return model


def open_checkpoint(load_format: str, model_config: ModelConfig, source: ModelSource) -> Checkpoint:
    """The checkpoint of `source`, its table of tensors read. load_format is auto, safetensors or gguf."""
    kind = {"folder": "safetensors", "gguf": "gguf"}[source.kind]
    if load_format not in ("auto", kind):
        raise ConfigError(f"load_format is {load_format!r} but {source.path} is {kind}. Leave load_format at auto.")
    if kind == "gguf":
        from zhilight.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path, model_config)
    from zhilight.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def match_tensors(model: Model, checkpoint: Checkpoint) -> dict[str, _Target]:
    """Checkpoint tensor -> where it goes. Raises CheckpointError naming every tensor that does not fit."""
    targets = {part.name: _Target(parameter, part) for parameter in model.parameters() for part in parameter.parts}
    ignored = [re.compile(pattern) for pattern in model.ignored_tensors]
    unknown = [name for name in checkpoint.entries
               if name not in targets and not any(pattern.match(name) for pattern in ignored)]
    problems = []
    _report(problems, "missing", [name for name in targets if name not in checkpoint.entries])
    _report(problems, "unknown", unknown)
    wrong = []
    for name, target in targets.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            continue
        expected = target.parameter.part_shape(target.part)
        if entry.shape != expected:
            wrong.append(f"{name} is {list(entry.shape)}, expected {list(expected)}")
        elif not entry.floating:
            wrong.append(f"{name} has dtype {entry.dtype}, expected floating-point numbers")
    _report(problems, "of a wrong shape or dtype", wrong)
    if problems:
        raise CheckpointError(f"{checkpoint.location} does not fit {model.config.architecture}: {'; '.join(problems)}. "
                              "Check that config.json and the weights belong together.")
    return targets


def _report(problems: list[str], what: str, items: list[str]) -> None:
    if items:
        more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
        problems.append(f"{len(items)} tensors {what}: {', '.join(items[:_LISTED])}{more}")


def _copy(checkpoint: Checkpoint, targets: dict[str, _Target], ops: Ops, progress: bool) -> None:
    from tqdm import tqdm

    total = sum(checkpoint.entries[name].nbytes for name in targets)
    # disable=None: silent where standard error is not a terminal
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for block in checkpoint.blocks(targets):
            target = targets[block.name]
            view = target.parameter.view(target.part)
            if block.start or block.values.shape != tuple(view.shape):
                view = view[block.start:block.start + block.values.shape[0]]
            ops.upload(view, block.values)
            bar.update(block.nbytes)


def _fill_random(model: Model, ops: Ops) -> None:
    """Weights of such a size that activations and logits stay near 1: normal of 1 / sqrt(inputs); norms near 1."""
    for seed, parameter in enumerate(model.parameters()):
        if len(parameter.shape) > 1:
            ops.fill_random(parameter.array, parameter.shape[-1] ** -0.5, seed)
        else:
            is_bias = parameter.parts[0].name.endswith(".bias")
            ops.fill_random(parameter.array, 0.02, seed, mean=0.0 if is_bias else 1.0)
