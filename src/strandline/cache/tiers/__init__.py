"""Tiers below the device: what evicted entries are kept in, and loads from there. Attached to a cache by ``Loads``."""

from strandline.cache.tiers.load_costs import LoadCosts
from strandline.cache.tiers.loads import Loads
from strandline.cache.tiers.lower_memory import LowerMemory

__all__ = ["LoadCosts", "Loads", "LowerMemory"]
