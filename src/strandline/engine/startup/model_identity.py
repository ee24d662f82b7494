"""The identity of a model, compared before bytes that it has computed are used by another process."""

from pathlib import Path

from strandline.config import EngineConfig
from strandline.models.lora.adapter_files import read_adapter
from strandline.models.storage.weights_files import fingerprint
from strandline.text.model_files import find_drafter, find_model


def weights_of_files(config: EngineConfig) -> str:
    """Return the digest that files of a tier are compared by; "" if there are none. As ``weights_digest``."""
    return weights_digest(config) if config.file_tier else ""


def weights_digest(config: EngineConfig) -> str:
    """Return a digest of a model's weights, of the adapter that is added to them, and of what drafts.

    Raises:
        ConfigError: they cannot be read.
    """
    if config.load_format == "dummy":
        return f"random {config.seed}"
    digests = [fingerprint(find_model(config.model))]
    if config.merged_lora is not None:
        digests.append(read_adapter(Path(config.merged_lora.path)).digest)
    speculation = config.speculation
    if speculation is not None and speculation.drafter_method is not None:
        digests += ["with", speculation.drafter_method]
        if speculation.model is not None:
            digests.append(fingerprint(find_drafter(speculation.model)))
    return " ".join(digests)
