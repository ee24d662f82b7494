"""Load on a server that speaks OpenAI's API, and what came of it: ``strandline bench serve`` and ``bench report``."""
