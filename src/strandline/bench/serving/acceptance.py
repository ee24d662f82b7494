"""Acceptance of drafts during a run, from a server's metrics before and after it.

The metrics' names are vLLM's, after the prefix of the engine; those of the figures are vLLM's benchmark's.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

METRIC: Final = re.compile(r"^\w+:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION: Final = re.compile(r'(?:^|,)position="(\d+)"')

DraftCounts = dict[tuple[str, int], float]
"""Metrics of drafts, by name and position; 0 where there is none. Empty: the server has no such metrics."""


def read_draft_counts(metrics: str) -> DraftCounts:
    """Return the counts of drafts in a server's metrics, summed over its engines."""
    counts: DraftCounts = {}
    for name, labels, value in METRIC.findall(metrics):
        found = POSITION.search(labels)
        key = name, int(found[1]) if found else 0
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def acceptance_figures(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """Return what became of the drafts of a run; nothing where there were none."""
    gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
    num_drafts, drafted = gained.get(("drafts", 0), 0.0), gained.get(("draft_tokens", 0), 0.0)
    accepted = gained.get(("accepted_tokens", 0), 0.0)
    if num_drafts <= 0 or drafted <= 0:
        return {}
    by_position = sorted((key[1], value) for key, value in gained.items() if key[0] == "accepted_tokens_per_pos")
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / num_drafts,
        "spec_decode_num_drafts": int(num_drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [value / num_drafts for _, value in by_position],
    }


def acceptance_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table's rows: label and text; none without drafts."""
    if "spec_decode_num_drafts" not in figures:
        return []
    rates = figures["spec_decode_per_position_acceptance_rates"]
    return [
        ("Acceptance rate (%):", f"{figures['spec_decode_acceptance_rate']:.2f}"),
        ("Acceptance length:", f"{figures['spec_decode_acceptance_length']:.2f}"),
        ("Drafts:", f"{figures['spec_decode_num_drafts']}"),
        ("Draft tokens:", f"{figures['spec_decode_draft_tokens']}"),
        ("Accepted tokens:", f"{figures['spec_decode_accepted_tokens']}"),
        *([("Per-position acceptance (%):", "")] if rates else []),
        *((f"  Position {position}:", f"{rate * 100:.2f}") for position, rate in enumerate(rates)),
    ]
