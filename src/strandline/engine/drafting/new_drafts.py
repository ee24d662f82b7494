"""Drafts of an engine with a device. Replays have none: they take :class:`Drafts`, and load no torch."""

from strandline.cache import PrefixCache
from strandline.device.executor import ExecutorFacts
from strandline.engine.drafting.drafters import new_draft_depth, new_drafter
from strandline.engine.drafting.drafts import Drafts
from strandline.engine.drafting.step_drafts import DraftLimits
from strandline.speculative_config import SpeculativeConfig


def new_drafts(cache: PrefixCache, facts: ExecutorFacts, config: SpeculativeConfig | None) -> Drafts:
    """Return the drafts of an engine, as configured."""
    if config is None:
        return Drafts(cache)
    room = (facts.corrects_lengths, facts.verified_prompts)
    limits = DraftLimits(facts.draft_tokens, config.tokens_kept_ahead, *room)
    return Drafts(cache, new_drafter(config), limits, new_draft_depth(config), config.methods)
