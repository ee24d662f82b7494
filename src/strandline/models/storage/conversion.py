"""Conversion of a published model to quantised weights, in the layouts of published models (``quantizers.py``).

As in those models, projections are converted, but not embeddings, the output head, norms, convolutions, routers, gates
of one output, the narrow projections to decays and write strengths, vision towers, or the projection into draft layers.
Experts published in one tensor are written one by one, except Granite's and Inkling's, whose naming does not allow it:
they stay in one tensor, with all scales in another.

Shape suffixes: N rows, K columns.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import check_architecture, read_json_object, read_recipe
from strandline.models.storage.fp8 import CHUNK_ELEMENTS
from strandline.models.storage.published import STORED_DTYPES, Holders
from strandline.models.storage.published_names import TOWERS
from strandline.models.storage.quantizers import BLOCK, QUANTIZERS, Parts, Quantizer
from strandline.models.storage.weights_files import INDEX_NAME, open_files

SHARD_BYTES: Final = 2 * 2**30
"""Most bytes of an output file, a larger tensor excepted; as many are in memory at a time."""

UNCONVERTED: Final = re.compile(
    r"embed|norm|conv1d|visual|vision|audio|sound|projector|\.router(\.|$)|\.mlp\.gate\."
    r"|(^|\.)(lm_head|gate|shared_expert_gate|fc|eh_proj|conv|in_proj_(a|b|ba)|[ab]_proj)$"
)
"""Matches the names of modules that are not converted."""

IN_TOWER: Final = re.compile(rf"(model\.)?({'|'.join(TOWERS)})\.")
"""Matches the names of modules of towers, and of what projects their outputs."""

DRAFT: Final = re.compile(r"(^|\.)mtp\.")
"""Matches the names of draft layers' modules."""

FUSED_EXPERTS: Final = re.compile(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)")

STACKED_EXPERTS: Final = re.compile(
    r".*\.(block_sparse_moe\.(input|output)_linear\.weight|experts\.w(13|2)_weight"
    r"|shared_experts\.(shared_w(13|2)_weight|(gate|up|down)_proj))"
)

JOINED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("in_proj_qkv", "in_proj_z"))
"""Projections of one module that other loaders take as one matrix."""

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


def convert(
    source: Path, output: Path, format: str = "fp8", ignore: Sequence[str] = (), *, progress: bool = False
) -> ConversionReport:
    """Write the model in directory ``source`` to directory ``output``, with its projections quantised.

    Args:
        output: does not exist, or is empty. Its ``config.json`` is written last.
        format: one of ``QUANTIZERS``.
        ignore: patterns of modules that are not converted, as of ``fnmatch``.
        progress: show a bar.

    Raises:
        ConfigError: the model is quantised already or not supported, a pattern matches no module, nothing can be
            converted, or ``output`` is not empty.
        WeightsError: a file is unreadable, or a weight is not a finite number.
    """
    check_architecture(source)
    config = read_json_object(source / "config.json")
    if config.get("quantization_config") or read_recipe(source) is not None:
        raise ConfigError(f"{source} is quantised already")
    report = ConversionReport()
    with ExitStack() as stack:
        files = open_files(source, stack)
        holders = {name: file for file in files for name in file.names()}
        conversion = _Conversion(QUANTIZERS[format], holders, report)
        chosen = _choose(source, conversion.takes, holders, ignore, format)
        _make_directory(output)
        shards = _ShardWriter(output)
        for name in tqdm(holders, desc="Converting", unit="tensor", disable=not progress):
            for new_name, tensor in conversion.converted(name) if name in chosen else conversion.copied(name):
                shards.add(new_name, tensor)
    report.bytes_after = shards.close()
    for path in {path for pattern in COPIED_FILES for path in source.glob(pattern)}:
        if path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, output / path.name)
    config["quantization_config"] = QUANTIZERS[format].config(sorted(report.unconverted))
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return report


def is_converted(name: str, shape: Sequence[int]) -> bool:
    """Return whether a published tensor of this name and shape is quantised in published models."""
    if FUSED_EXPERTS.fullmatch(name) or STACKED_EXPERTS.fullmatch(name):
        return len(shape) == 3
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and not (UNCONVERTED.search(module) or IN_TOWER.match(module))


def _choose(
    source: Path, takes: Callable[[str], bool], holders: Holders, ignore: Sequence[str], format: str
) -> set[str]:
    """Return the names of the tensors to convert."""
    modules = {name: name.removesuffix(".weight") for name in holders}
    for pattern in ignore:
        if not any(fnmatchcase(module, pattern) for module in modules.values()):
            raise ConfigError(
                f"--ignore {pattern} matches no module of {source}, such as {next(iter(modules.values()))}"
            )
    kept = {name for name, module in modules.items() if any(fnmatchcase(module, pattern) for pattern in ignore)}
    chosen = {name for name in holders if name not in kept and takes(name)}
    if not chosen:
        raise ConfigError(
            f"{source} has no weight to convert to {format}: projections whose inputs are a multiple of "
            f"{QUANTIZERS[format].multiple}, and that no --ignore matches"
        )
    return chosen


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty; name a new directory")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error}") from error


def quantized_like(holders: Holders, quantizers: Mapping[str, Quantizer]) -> tuple[dict[str, Tensor], set[str]]:
    """Convert weights to the formats that weights of the same names have in another model.

    Args:
        holders: weights that are quantised already are left out.
        quantizers: by the names of such weights, those of one expert each.

    Returns:
        The tensors that are published instead, and the names of those that they replace.

    Raises:
        WeightsError: a weight is not a finite number, or has inputs that its format does not allow.
    """
    found, replaced = dict[str, Tensor](), set[str]()
    for name, file in holders.items():
        fused = FUSED_EXPERTS.fullmatch(name)
        expert = f"{fused[1]}.0.{fused[2].replace('gate_up', 'up')}.weight" if fused else name
        quantizer = quantizers.get(name) or quantizers.get(expert)
        if quantizer is None or file.dtype(name) not in STORED_DTYPES:
            continue
        shape = file.shape(name)
        if shape[-1] % quantizer.multiple:
            raise WeightsError(f"{name} has {shape[-1]} inputs; its format asks for a multiple of {quantizer.multiple}")
        found.update(_Conversion(quantizer, holders, ConversionReport()).converted(name))
        replaced.add(name)
    return found, replaced


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Converts tensors one by one, and adds to the report."""

    quantizer: Quantizer
    holders: Holders
    report: ConversionReport

    def takes(self, name: str) -> bool:
        """Return whether a published tensor is converted, unless it is ignored."""
        shape = self.holders[name].shape(name)
        return (
            is_converted(name, shape)
            and f"{name}_bias" not in self.holders  # transposed experts, whose rows alternate
            and shape[-1] % self.quantizer.multiple == 0
            and (self.quantizer.takes_drafts or DRAFT.search(name) is None)
        )

    def _read(self, name: str) -> Tensor:
        tensor = self.holders[name].get(name)
        self.report.num_tensors += 1
        self.report.bytes_before += tensor.nbytes
        return tensor

    def copied(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor that is not converted."""
        tensor = self._read(name)
        module = name.removesuffix(".weight")
        if is_converted(name, tensor.shape) or (tensor.ndim == 2 and module != name):
            self.report.unconverted.add(module)
        yield name, tensor

    def converted(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors published instead of a tensor."""
        dtype = self.holders[name].dtype(name)
        if dtype not in STORED_DTYPES:
            raise WeightsError(f"{name} is stored as {dtype}; converted are {', '.join(STORED_DTYPES)}")
        self.report.num_converted += 1
        for new_name, weight, largest in self._matrices(name, self._read(name)):
            if weight.ndim == 2:
                parts = self._quantize(new_name, weight, largest)
            else:
                matrices = [self._quantize(new_name, *matrix) for matrix in zip(weight, largest, strict=True)]
                parts = {suffix: torch.stack([matrix[suffix] for matrix in matrices]) for suffix in matrices[0]}
            for suffix, part in (parts | self.quantizer.once(weight.shape, largest)).items():
                yield new_name + suffix, part

    def _matrices(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield a tensor, or the matrices of experts that come in one, under their published names.

        With each comes the largest absolute weight that its factor is to fit, or those of several matrices.
        """
        fused = FUSED_EXPERTS.fullmatch(name)
        if fused is None:
            is_stack = tensor.ndim > 2
            largest = torch.stack([*map(_largest, tensor)]) if is_stack else self._largest_of_joined(name, tensor)
            yield name, tensor, largest
            return
        for index, expert in enumerate(tensor):
            parts = {fused[2]: expert}
            if fused[2] == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for kind, part in parts.items():
                yield f"{fused[1]}.{index}.{kind}.weight", part, _largest(expert)

    def _largest_of_joined(self, name: str, tensor: Tensor) -> Tensor:
        """Return the largest absolute weight of a tensor, and of the others that other loaders join it with."""
        largest = _largest(tensor)
        owner, _, module = name.removesuffix(".weight").rpartition(".")
        for joined in JOINED if self.quantizer.has_factor else ():
            names = [f"{owner}.{other}.weight" for other in joined if module in joined and other != module]
            for other in filter(self.holders.__contains__, names):
                largest = torch.maximum(largest, _largest(self.holders[other].get(other)))
        return largest

    def _quantize(self, name: str, weight_NK: Tensor, largest: Tensor) -> Parts:
        """Return the parts of a matrix that have its rows, converted a few rows of blocks at a time."""
        step = max(1, CHUNK_ELEMENTS // (BLOCK * max(1, weight_NK.shape[1]))) * BLOCK
        parts = dict[str, list[Tensor]]()
        for rows_NK in weight_NK.split(step):
            exact = rows_NK.float()
            if not bool(exact.isfinite().all()):
                raise WeightsError(f"{name} holds a weight that is not a finite number")
            rows = self.quantizer.quantize(rows_NK, largest)
            for suffix, part in rows.parts.items():
                parts.setdefault(suffix, []).append(part)
            self.report.square_error += float((rows.restored_NK - exact).double().square().sum())
            self.report.square_sum += float(exact.double().square().sum())
        return {suffix: torch.cat(of_rows) for suffix, of_rows in parts.items()}


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute number, in float32."""
    return torch.maximum(tensor.amax(), -tensor.amin()).float()


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
        (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self._total_bytes
