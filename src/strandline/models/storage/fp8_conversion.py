"""Conversion of a published model to FP8 weights (e4m3), one scale per block: the layout of published FP8 models.

As in those models, projections are converted, but not embeddings, the output head, norms, convolutions, routers, gates
of one output, the narrow projections to decays and write strengths, vision towers, or the projection into draft layers.
Experts published in one tensor are written one by one, except Granite's and Inkling's, whose naming does not allow it:
they stay in one tensor, with all scales in another.

Shape suffixes: N rows, K columns, Y and X blocks downwards and across, B rows and columns of a block.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import check_architecture, read_json_object, read_recipe
from strandline.models.storage.fp8 import CHUNK_ELEMENTS
from strandline.models.storage.weights_files import INDEX_NAME, open_files

BLOCK: Final = 128
MAX_E4M3: Final = 448.0

SHARD_BYTES: Final = 2 * 2**30
"""Most bytes of an output file, a larger tensor excepted; as many are in memory at a time."""

UNCONVERTED: Final = re.compile(
    r"embed|norm|conv1d|visual|vision|audio|sound|projector|\.router(\.|$)|\.mlp\.gate\."
    r"|(^|\.)(lm_head|gate|shared_expert_gate|fc|eh_proj|conv|in_proj_(a|b|ba)|[ab]_proj)$"
)
"""Matches the names of modules that are not converted."""

FUSED_EXPERTS: Final = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")

STACKED_EXPERTS: Final = re.compile(
    r".*\.(block_sparse_moe\.(input|output)_linear\.weight|experts\.w(13|2)_weight"
    r"|shared_experts\.(shared_w(13|2)_weight|(gate|up|down)_proj))"
)

COPIED_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")


@dataclass
class ConversionReport:
    """Summary of a conversion."""

    num_tensors: int = 0
    num_converted: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    square_error: float = 0.0
    square_sum: float = 0.0
    unconverted: set[str] = field(default_factory=set)
    """Modules whose matrices are not converted."""

    @property
    def relative_error(self) -> float:
        """Root mean square error of the converted weights, over their root mean square."""
        return (self.square_error / self.square_sum) ** 0.5 if self.square_sum else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_converted} of {self.num_tensors} tensors converted, {self.bytes_before:,} bytes to "
            f"{self.bytes_after:,}; error of the converted weights {self.relative_error:.2%}"
        )


def convert_to_fp8(source: Path, output: Path, *, progress: bool = False) -> ConversionReport:
    """Write the model in directory ``source`` to directory ``output``, in FP8.

    Args:
        output: does not exist, or is empty. Its ``config.json`` is written last.
        progress: show a bar.

    Raises:
        ConfigError: the model is quantised already or not supported, or ``output`` is not empty.
        WeightsError: a file is unreadable, or a weight is not a finite number.
    """
    check_architecture(source)
    config = read_json_object(source / "config.json")
    if config.get("quantization_config") or read_recipe(source) is not None:
        raise ConfigError(f"{source} is quantised already")
    _make_directory(output)
    report = ConversionReport()
    with ExitStack() as stack:
        files = open_files(source, stack)
        shards, names = _ShardWriter(output), [(file, name) for file in files for name in file.names()]
        for file, name in tqdm(names, desc="Converting", unit="tensor", disable=not progress):
            for new_name, tensor in _converted(name, file.get(name), report):
                shards.add(new_name, tensor)
    report.bytes_after = shards.close()
    for path in {path for pattern in COPIED_FILES for path in source.glob(pattern)}:
        if path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, output / path.name)
    config["quantization_config"] = _quantization_config(report)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return report


def is_converted(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a published tensor of this name and shape is quantised."""
    if FUSED_EXPERTS.fullmatch(name) or STACKED_EXPERTS.fullmatch(name):
        return len(shape) == 3
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and not UNCONVERTED.search(module)


def quantize_blocks(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights in e4m3, and the float32 ``scale_YX`` that multiply them: largest of a block / 448."""
    num_rows, num_columns = weight_NK.shape
    padded = F.pad(weight_NK.float(), (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    blocks_YBXB = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    smallest = torch.finfo(torch.float32).tiny
    scale_YX = (blocks_YBXB.abs().amax((1, 3)) / MAX_E4M3).clamp_(min=smallest)
    blocks_YBXB /= scale_YX[:, None, :, None]
    quantized = padded.clamp_(-MAX_E4M3, MAX_E4M3)[:num_rows, :num_columns].to(torch.float8_e4m3fn)
    return quantized.contiguous(), scale_YX


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty; name a new directory")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error}") from error


def _converted(name: str, tensor: Tensor, report: ConversionReport) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors published instead of a tensor."""
    report.num_tensors += 1
    report.bytes_before += tensor.nbytes
    if not is_converted(name, tuple(tensor.shape)):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.ndim == 2:
            report.unconverted.add(module)
        yield name, tensor
        return
    report.num_converted += 1
    for matrix_name, weight in _matrices(name, tensor):
        quantized, scales = _quantize_in_parts(matrix_name, weight, report)
        yield matrix_name, quantized
        yield f"{matrix_name}_scale_inv", scales


def _matrices(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the matrices of experts that come in one, under their published names."""
    fused = FUSED_EXPERTS.fullmatch(name)
    if fused is None:
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        parts = {"down_proj": expert}
        if fused[2] == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        for kind, part in parts.items():
            yield f"{fused[1]}.{index}.{kind}.weight", part


def _quantize_in_parts(name: str, weight: Tensor, report: ConversionReport) -> tuple[Tensor, Tensor]:
    """As ``quantize_blocks``, matrix by matrix where there are several; adds the error to the report."""
    if weight.ndim == 2:
        return _quantize_matrix(name, weight, report)
    matrices = [_quantize_matrix(name, weight_NK, report) for weight_NK in weight]
    return torch.stack([values for values, _ in matrices]), torch.stack([scale_YX for _, scale_YX in matrices])


def _quantize_matrix(name: str, weight_NK: Tensor, report: ConversionReport) -> tuple[Tensor, Tensor]:
    """As ``quantize_blocks``, a few rows of blocks at a time; adds the error to the report."""
    step = max(1, CHUNK_ELEMENTS // (BLOCK * max(1, weight_NK.shape[1]))) * BLOCK
    parts = []
    for rows_NK in weight_NK.split(step):
        exact = rows_NK.float()
        if not bool(exact.isfinite().all()):
            raise WeightsError(f"{name} holds a weight that is not a finite number")
        quantized, scale_YX = quantize_blocks(exact)
        parts.append((quantized, scale_YX))
        scale_NK = scale_YX.repeat_interleave(BLOCK, 0)[: len(exact)].repeat_interleave(BLOCK, 1)
        error = quantized.float() * scale_NK[:, : exact.shape[1]] - exact
        report.square_error += float(error.double().square().sum())
        report.square_sum += float(exact.double().square().sum())
    return torch.cat([part for part, _ in parts]), torch.cat([scale_YX for _, scale_YX in parts])


def _quantization_config(report: ConversionReport) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(report.unconverted),
    }


class _ShardWriter:
    """Writes tensors to files of at most ``SHARD_BYTES``, and their index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._pending_bytes = self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._tensors[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        self._files.append(list(self._tensors))
        path = self._directory / f"part-{len(self._files)}"
        path.touch()
        mode = path.stat().st_mode
        save_file(self._tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors makes it readable by the owner only
        self._tensors, self._pending_bytes = {}, 0

    def close(self) -> int:
        """Write the remaining tensors; return the bytes of all."""
        self._flush()
        count, placed = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            (self._directory / f"part-{number}").rename(self._directory / file)
            placed |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(placed.items()))}
        (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        return self._total_bytes
