"""The prefix cache: pure decisions over ids and tokens. No tensors, no I/O, no wall clock."""

from strandline.cache.account import Account, CacheCounters, Miss, Reason, SnapshotKind
from strandline.cache.actions import Action, CopyTokens, DropBlocks, DropSlot, FoldLog, MoveBlock
from strandline.cache.core import PrefixCache
from strandline.cache.lease import Cut, Lead, Lease, StepGrant
from strandline.cache.placement import OnGrid, Placement, placement
from strandline.cache.resume import ResumeRule, resume_rule
from strandline.cache.tokens import TokenBuffer

__all__ = [
    "Account",
    "Action",
    "CacheCounters",
    "CopyTokens",
    "Cut",
    "DropBlocks",
    "DropSlot",
    "FoldLog",
    "Lead",
    "Lease",
    "Miss",
    "MoveBlock",
    "OnGrid",
    "Placement",
    "PrefixCache",
    "Reason",
    "ResumeRule",
    "SnapshotKind",
    "StepGrant",
    "TokenBuffer",
    "placement",
    "resume_rule",
]
