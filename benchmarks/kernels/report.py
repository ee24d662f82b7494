"""Rows of measurements: how they are printed, stored as JSON, and compared with earlier ones."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from case import BYTES_PER_S

COMPARED = ("registers", "spills", "shared")
"""Properties of kernels that have to stay the same."""


@dataclass
class Row:
    """One variant of one shape."""

    shape: str
    variant: str
    us: float | None = None
    floor_us: float | None = None
    error: float | None = None
    limit: float | None = None
    digest: str | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why there is no time."""

    @property
    def key(self) -> tuple[str, str]:
        return self.shape, self.variant

    @property
    def code(self) -> list[str]:
        """Checksums of the PTX of the kernels."""
        return [kernel.get("ptx", "") for kernel in self.kernels]

    @property
    def is_wrong(self) -> bool:
        return self.error is not None and self.limit is not None and not self.error <= self.limit

    def line(self) -> str:
        """Return what is printed."""
        cells = [f"{self.shape} | {self.variant}:"]
        if self.problem is not None:
            return f"{cells[0]} {self.problem}"
        if self.us is not None:
            cells.append(f"{self.us:.2f} us")
            if self.floor_us:
                cells.append(f"{100 * self.floor_us / self.us:.0f} % of floor")
        if self.error is not None:
            cells.append(f"error {self.error:.1e}{' WRONG' if self.is_wrong else ''}")
        cells += [f"{name} {value}" for name, value in self.notes.items()]
        cells += [f"{k['registers']} registers, {k['shared']} shared" for k in self.kernels[:1]]
        cells += [f"{spilled} kernels spill" for spilled in [sum(k["spills"] > 0 for k in self.kernels)] if spilled]
        return f"{cells[0]} {', '.join(cells[1:])}"


def bytes_per_s() -> float:
    """Return the bandwidth that floors assume for this GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for part, rate in BYTES_PER_S.items() if part in name), next(iter(BYTES_PER_S.values())))


def describe_machine() -> dict[str, str]:
    """Return what times and bits depend on."""
    triton = __import__("triton").__version__ if find_spec("triton") else "none"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {"date": str(date.today()), "device": device, "torch": torch.__version__, "triton": triton}


def save(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON."""
    path.write_text(json.dumps({**describe_machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, str], dict[tuple[str, str], Row]]:
    """Return the machine and the rows of a file."""
    machine = json.loads(path.read_text())
    rows = [Row(**row) for row in machine.pop("rows")]
    return machine, {row.key: row for row in rows}


def differences(row: Row, reference: Row, limit: float) -> list[str]:
    """Return in what a row is worse than an earlier one, or unlike it.

    Args:
        limit: largest ratio of times.
    """
    found = []
    if row.problem is not None and reference.problem is None:
        found.append(row.problem)
    if row.us is not None and reference.us is not None and row.us > limit * reference.us:
        found.append(f"{row.us / reference.us:.3f} of {reference.us:.2f} us")
    if row.digest is not None and reference.digest is not None and row.digest != reference.digest:
        found.append("bits differ")
    ours, theirs = ([{name: kernel[name] for name in COMPARED} for kernel in r.kernels] for r in (row, reference))
    if theirs and ours != theirs:
        found.append(f"kernels {_counts(ours)}, before {_counts(theirs)}")
    return found


def _counts(kernels: Sequence[dict[str, Any]]) -> str:
    return " ".join("/".join(str(kernel[name]) for name in COMPARED) for kernel in kernels) or "none"


def compare(rows: Sequence[Row], path: Path, limit: float) -> bool:
    """Print the rows that are worse than those of a file, or unlike them; return whether there are none."""
    machine, references = load(path)
    for name, value in describe_machine().items():
        if name != "date" and machine[name] != value:
            print(f"{path}: {name} is {machine[name]}, here {value}", flush=True)
    pairs = [(row, references[row.key]) for row in rows if row.key in references]
    ratios = sorted(row.us / old.us for row, old in pairs if row.us is not None and old.us)
    num_worse = 0
    for row, old in pairs:
        if found := differences(row, old, limit):
            num_worse += 1
            print(f"DIFFERS {row.shape} | {row.variant}: {'; '.join(found)}", flush=True)
    num_digests = sum(row.digest is not None and old.digest is not None for row, old in pairs)
    num_same_code = sum(bool(row.kernels) and row.code == old.code for row, old in pairs)
    spread = f"ratios {ratios[0]:.3f} to {ratios[-1]:.3f}, " if ratios else ""
    print(
        f"{len(pairs)} rows compared, {len(rows) - len(pairs)} new: {num_worse} differ; {spread}"
        f"{num_digests} checksums compared, {num_same_code} rows with equal PTX",
        flush=True,
    )
    return num_worse == 0
