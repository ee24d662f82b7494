"""The prefix cache: pure decisions over ids and tokens. No tensors, no I/O, no wall clock."""

from strandline.cache.account import Account, CacheCounters, Miss, Reason, SnapshotKind
from strandline.cache.actions import (
    Action,
    CancelTransfer,
    Completion,
    CopyTokens,
    DropBlocks,
    DropSlot,
    DropStored,
    FoldLog,
    LoadIn,
    MoveBlock,
    StoreOut,
)
from strandline.cache.core import PrefixCache
from strandline.cache.lease import Cut, Lead, Lease, StepGrant
from strandline.cache.load_costs import LoadCosts
from strandline.cache.lower_memory import LowerMemory
from strandline.cache.offer import Offer, OfferedSnapshot
from strandline.cache.placement import OnGrid, Placement, placement
from strandline.cache.resume import ResumeRule, resume_rule
from strandline.cache.tokens import TokenBuffer

__all__ = [
    "Account",
    "Action",
    "CacheCounters",
    "CancelTransfer",
    "Completion",
    "CopyTokens",
    "Cut",
    "DropBlocks",
    "DropSlot",
    "DropStored",
    "FoldLog",
    "Lead",
    "Lease",
    "LoadCosts",
    "LoadIn",
    "LowerMemory",
    "Miss",
    "MoveBlock",
    "Offer",
    "OfferedSnapshot",
    "OnGrid",
    "Placement",
    "PrefixCache",
    "Reason",
    "ResumeRule",
    "SnapshotKind",
    "StepGrant",
    "StoreOut",
    "TokenBuffer",
    "placement",
    "resume_rule",
]
