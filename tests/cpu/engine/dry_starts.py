"""What starts and prompts on a GPU launch, found without one: ``python -m tests.cpu.engine.dry_starts KIND MODEL ...``.

Triton's interpreter must be off.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from strandline.config import EngineConfig
from strandline.device.meta_device import META, zeros_from_meta
from strandline.engine.core import new_warm_up
from strandline.engine.loading import load_uni_executor
from strandline.engine.processes.dry_run import record_start
from strandline.engine.startup import warm_up
from strandline.kernels.gpu import GPUS
from strandline.kernels.ranks import ONE_RANK
from strandline.kernels.recording_triton import recording


def of_second_rank_alone(model: str) -> list[str]:
    """Return the kernels that the second of two ranks launches and the first does not: less than half."""
    config = EngineConfig(model=model, tensor_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=1024)
    ranks = [{each.digest: each.name for each in record_start(config, GPUS["sm_90"], rank)} for rank in range(2)]
    own = [name for digest, name in ranks[1].items() if digest not in ranks[0]]
    assert len(own) < len(ranks[1]) / 2
    return own


def after_the_start(model: str, lengths: Sequence[int], decodes: Sequence[int]) -> list[str]:
    """Return the kernels that prompts of these lengths launch beside as many decodes, and the start did not."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    config, names = EngineConfig(model=model, max_num_seqs=32, memory="4GiB", **options), list[str]()
    with recording(GPUS["sm_90"], lambda variant: names.append(variant.name)), zeros_from_meta():
        executor = load_uni_executor(config, None, ONE_RANK, device=META)
        new_warm_up(config, executor).run()
        assert names
        del names[:]
        changed: Any = warm_up
        changed.PROMPT_TOKENS, changed.NUM_DECODES = tuple(lengths), tuple(decodes)
        new_warm_up(config, executor).run()
    return names


if __name__ == "__main__":
    kind, model, *rest = sys.argv[1:]
    functions: dict[str, Any] = {"of the second rank alone": of_second_rank_alone, "after the start": after_the_start}
    names = functions[kind](model, *map(json.loads, rest))
    sys.stdout.writelines(f"{name}\n" for name in names)
