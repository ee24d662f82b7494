"""Facts about several ranks that the core plans by: what all of them have."""

from collections.abc import Sequence
from dataclasses import replace

from strandline.device.executor import ExecutorFacts
from strandline.device.stores.lower_stores import DiskFacts
from strandline.engine.workers.joined_kept import join_kept
from strandline.errors import EngineError


def join_facts(facts: Sequence[ExecutorFacts]) -> tuple[ExecutorFacts, list[dict[int, int]]]:
    """Return the facts of all ranks together: phases of the start took as long as on the slowest.

    Returns:
        Beside them, for each rank of several with a disk cache, the new addresses of what that has kept, by its own.

    Raises:
        EngineError: ranks do not agree on what must be equal.
    """
    first, *others = facts
    if any(_shared(each) != _shared(first) for each in others):
        raise EngineError(f"ranks do not agree on what the engine has: {[_shared(each) for each in facts]}")
    phases = {phase: max(each.start_s[phase] for each in facts) for phase in first.start_s}
    disks = [each.lower.disk for each in facts if each.lower.disk is not None]
    if not others or not disks:
        return replace(first, start_s=phases), []
    kept, renames = join_kept([disk.kept.pop() for disk in disks])
    disk = replace(disks[0], kept=[kept], scan_s=max(disk.scan_s for disk in disks))
    return replace(first, start_s=phases, lower=replace(first.lower, disk=disk)), renames


def _shared(facts: ExecutorFacts) -> ExecutorFacts:
    """Return facts without what each rank has for itself."""
    disk = facts.lower.disk and DiskFacts("", facts.lower.disk.num_blocks, b"", [], 0.0)
    objects = facts.lower.objects and replace(facts.lower.objects, layout={})
    return replace(facts, start_s={}, lower=replace(facts.lower, disk=disk, objects=objects))
