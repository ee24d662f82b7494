"""The identity of a model, compared before bytes that it has computed are used by another process."""

from strandline.config import EngineConfig
from strandline.models.storage.weights_files import fingerprint
from strandline.text.model_files import find_model


def disk_cache_weights(config: EngineConfig) -> str:
    """Return the digest that a disk cache compares; "" if there is none. As ``weights_digest``."""
    return "" if config.disk_cache is None else weights_digest(config)


def weights_digest(config: EngineConfig) -> str:
    """Return a digest of a model's weights.

    Raises:
        ConfigError: they cannot be read.
    """
    return f"random {config.seed}" if config.load_format == "dummy" else fingerprint(find_model(config.model))
