"""Facts about several ranks that the core plans by: what all of them have."""

from collections.abc import Sequence
from dataclasses import replace

from strandline.device.executor import ExecutorFacts
from strandline.engine.workers.joined_entries import join_entries
from strandline.errors import EngineError


def join_facts(facts: Sequence[ExecutorFacts]) -> tuple[ExecutorFacts, list[dict[int, int]]]:
    """Return the facts of all ranks together: phases of the start took as long as on the slowest.

    Returns:
        The facts, and for each of several ranks with persisted entries a map from its addresses to the joined ones.

    Raises:
        EngineError: ranks do not agree on what must be equal.
    """
    first, *others = facts
    if any(_shared(each) != _shared(first) for each in others):
        raise EngineError(f"ranks do not agree on what the engine has: {[_shared(each) for each in facts]}")
    phases = {phase: max(each.start_s[phase] for each in facts) for phase in first.start_s}
    files = [each.lower.files for each in facts if each.lower.files is not None and each.lower.files.persisted]
    if not others or not files:
        return replace(first, start_s=phases), []
    persisted, renames = join_entries([each.persisted.pop() for each in files])
    joined = replace(files[0], persisted=[persisted], scan_s=max(each.scan_s for each in files))
    return replace(first, start_s=phases, lower=replace(first.lower, files=joined)), renames


def _shared(facts: ExecutorFacts) -> ExecutorFacts:
    """Return facts without what each rank has for itself."""
    files = facts.lower.files and replace(facts.lower.files, location="", key=b"", layout={}, persisted=[], scan_s=0.0)
    return replace(facts, start_s={}, lower=replace(facts.lower, files=files))
